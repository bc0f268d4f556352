"""A hosted model that only writes text, through OpenAI's chat completions or Anthropic's messages.

Its answers are stored on disk by prompt with their prices, so that no answer is paid for twice, and
a run stops before it exceeds its budget.
"""

import logging
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from practicum.ports import (
    Capabilities,
    Teacher,
    TeacherConfig,
    TeacherContext,
)
from practicum.teaching.chat import FREE, ChatServer, ChatTeacher, PaperWriter, TokenPrices
from practicum.teaching.chat_protocols import PROTOCOLS, ProtocolName
from practicum.teaching.probe import list_models
from practicum.teaching.remote import ServerGenerator, ServerLimits
from practicum.teaching.served import ServedConfig, open_server
from practicum.teaching.stored_answers import AnswerStore

log = logging.getLogger(__name__)


class Config(TeacherConfig, ServedConfig):
    """The API's address and protocol, its prices, and the folder of its answers."""

    type: Literal["chat_api"] = "chat_api"
    protocol: ProtocolName = Field(default="openai", description="the protocol of the API")
    model: str = Field(min_length=1, description="the model's name at the API")
    system: str | None = Field(default=None, description="a system turn put before every prompt")
    prices: TokenPrices | None = Field(default=None, description="none: answers cost nothing")
    budget: float | None = Field(
        default=None, gt=0, description="money for all answers in the folder; the run stops before"
    )
    folder: Path | None = Field(
        default=None, description="folder of the answers; none: `scores` in the run's folder"
    )
    reuse: bool = Field(default=True, description="use the stored answers for a repeated prompt")
    retry_seconds: float = Field(
        default=600.0, ge=0, description="seconds during which a failing request is retried"
    )

    @model_validator(mode="after")
    def _check_budget(self) -> "Config":
        if self.budget is not None and self.prices is None:
            raise ValueError(
                "budget: it needs prices; set for example "
                "prices: {input: 3.0, output: 15.0}, for a million tokens each"
            )
        return self

    def capabilities(self) -> Capabilities:
        """Return no signal: the API only answers messages."""
        return Capabilities(frozenset(), frozenset(), largest_k=0, follows_student=False)

    @property
    def money_limit(self) -> float | None:
        """The budget."""
        return self.budget

    def estimate_money(self, input_tokens: float, output_tokens: float) -> float | None:
        """Return the price of an answer with these numbers of tokens, or None without prices."""
        return None if self.prices is None else self.prices.compute(input_tokens, output_tokens)


def build(config: Config, context: TeacherContext) -> Teacher:
    """Look the model up, where the API lists its models, and open the stored answers."""
    config.declare_size(context.meter)
    if context.is_dry_run:
        return PaperWriter(config.capabilities(), context.renderer, context.meter)
    protocol = PROTOCOLS[config.protocol]
    http = open_server(config, protocol.key_header)
    models, _ = list_models(http)
    model = config.model
    if models and model not in models:
        # Many APIs accept aliases that they do not list.
        log.info(f"{http.address}: {model} is not among the models that it lists")
    folder = context.scores_dir
    if config.folder is not None:
        folder = context.base_dir / config.folder.expanduser()
    limits = ServerLimits(config.timeout, config.tokens_per_second, config.concurrency)
    generator = ServerGenerator(http, model, context.renderer, limits, context.meter)
    store = AnswerStore(folder)
    server = ChatServer(
        generator, protocol, store, config.reuse, config.prices or FREE, config.budget
    )

    def log_counts() -> None:
        counts = server.counts
        log.info(
            f"{http.address}: {counts.requests} answers, {counts.hits} of them kept before, "
            f"{counts.refusals} refused, {http.rate_limits} waits for a rate limit; all kept "
            f"answers cost {store.money:.4g}"
        )

    context.after_training.append(log_counts)
    return ChatTeacher(server, config.capabilities(), config.system)
