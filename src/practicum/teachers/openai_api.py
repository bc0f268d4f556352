"""A teacher behind another server: vLLM, SGLang, and others with OpenAI's HTTP API.

At its start, the run probes the server's capabilities (see `practicum probe`) and compares them
with the recipe before anything else. The server scores the student's tokens; text is only sent to a
server that gives no scores.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from practicum.errors import CapabilityError, TeacherError
from practicum.objective import EVERY_SIGNAL, SignalName
from practicum.ports import (
    Capabilities,
    Teacher,
    TeacherConfig,
    TeacherContext,
)
from practicum.remote.http import JsonClient
from practicum.teaching.chat import ChatServer, ChatTeacher
from practicum.teaching.chat_protocols import OpenAIProtocol
from practicum.teaching.checks import check_texts
from practicum.teaching.client import ClientTeacher
from practicum.teaching.dialects import DialectName
from practicum.teaching.probe import Probe, probe
from practicum.teaching.reading import ReadingConfig
from practicum.teaching.remote import RemoteClient, ServerGenerator, ServerLimits
from practicum.teaching.served import ServedConfig, open_server
from practicum.teaching.states import StatesClient, StatesConfig, StatesFolder
from practicum.teaching.vocabulary import translate_client

log = logging.getLogger(__name__)

PINNED = 0.5
"""Nats by which the sum over 24 half-precision canary tokens may differ from the pinned sum."""


class Config(TeacherConfig, ReadingConfig, ServedConfig):
    """The server's address and limits, and the renderer of its model."""

    type: Literal["openai_api"] = "openai_api"
    model: str | None = Field(
        default=None, description="the model's name at the server; none: the only model"
    )
    dialect: DialectName = Field(
        default="auto", description="the request format for scores; `chat`: completions only"
    )
    largest_k: int = Field(
        default=20, ge=0, description="candidates that a signal may ask for; vLLM's own limit is 20"
    )
    token_budget: int | None = Field(
        default=None, ge=1, description="limit of scored tokens; the run stops before exceeding it"
    )
    canary_every: int = Field(
        default=16, ge=1, description="calls between two checks that the model is still the same"
    )
    temperature: float = Field(
        default=1.0,
        gt=0,
        description="temperature of its scores, if the server follows it; 1: unchanged",
    )
    states: StatesConfig | None = Field(
        default=None,
        description="hidden states that the server writes, for an exact `signal: full`",
    )
    canary: float | None = Field(
        default=None, description="the number that `practicum probe` prints: refuse other models"
    )

    @model_validator(mode="after")
    def _check_states(self) -> Self:
        if self.states is not None and self.temperature != 1.0:
            raise ValueError(
                "states give the model's own distribution, so teacher.temperature does nothing; "
                "write target: teacher(temperature=...) in the objective"
            )
        return self

    def capabilities(self) -> Capabilities:
        """Return the most that such a server can give; the server itself is probed at the start."""
        if self.dialect == "chat":
            return Capabilities(
                signals=frozenset(), supports=frozenset(), largest_k=0, follows_student=False
            )
        if self.states is not None:
            return EVERY_SIGNAL
        signals = frozenset[SignalName]({"sampled", "topk"} if self.largest_k else {"sampled"})
        # Only this dialect has no way of naming candidates.
        supports = {"teacher"} if self.dialect == "echo" else {"teacher", "student"}
        return Capabilities(
            signals,
            frozenset(supports),
            self.largest_k,
            needs_candidates=True,
            follows_student=False,
            advice="teacher.states reads the full distribution of a vLLM server",
        )


def build(config: Config, context: TeacherContext) -> Teacher:
    """Probe the server, compare the vocabularies, and compare the model with the pinned canary."""
    config.declare_size(context.meter)
    http = open_server(config)
    renderer = config.build_renderer(http.address, context)
    vocabulary = renderer.vocab_size
    answers = probe(
        http,
        config.dialect,
        config.model,
        config.largest_k,
        vocabulary,
        temperature=config.temperature,
    )
    log.info(f"{http.address}: {'; '.join(answers.render_lines())}")
    _check_temperature(config, answers, http)
    _check_pin(config, answers, http)
    limits = ServerLimits(
        config.timeout,
        config.tokens_per_second,
        config.concurrency,
        config.token_budget,
        config.canary_every,
    )
    generator = ServerGenerator(http, answers.model, renderer, limits, context.meter)
    best = config.capabilities()
    if answers.dialect is None:
        silent = replace(best, signals=frozenset(), supports=frozenset(), largest_k=0)
        context.compare(context.renderer, renderer)
        return ChatTeacher(ChatServer(generator, OpenAIProtocol()), silent, config.system)
    check_texts(answers.texts or {}, renderer.tokenizer, http)
    signals = best.signals if answers.largest_k else best.signals & {"sampled"}
    supports = best.supports if answers.names else frozenset({"teacher"})
    capabilities = replace(best, signals=signals, supports=supports, largest_k=answers.largest_k)
    remote = RemoteClient(
        generator, answers, answers.dialect, capabilities, vocabulary, config.temperature
    )
    client: RemoteClient | StatesClient = remote
    if config.states is not None:
        client = _open_states(config.states, remote, answers, context)
    scorer = context.wrap_client(client, remote.find_folder)
    scorer = context.count_client(translate_client(scorer, renderer, context))
    return ClientTeacher(scorer, renderer, follower=client)


def _open_states(
    config: StatesConfig, remote: RemoteClient, answers: Probe, context: TeacherContext
) -> StatesClient:
    """Return the client that reads hidden states, once they gave the server's own scores."""
    if not answers.writes_states:
        raise CapabilityError(
            f"{remote.address}: its answers name no hidden states, so teacher.states has nothing to "
            "read; start it with the flags that practicum probe prints, or remove teacher.states"
        )
    ending = context.load_ending(config.describe_model())
    folder = StatesFolder(context.base_dir / Path(config.folder).expanduser(), ending.width)
    client = StatesClient(remote, folder, ending, answers.model, context.meter)
    assert answers.canary is not None, "the probe has scored the canary"
    client.check_ending(answers.sequence, answers.canary)
    return client


def _check_temperature(config: Config, answers: Probe, http: JsonClient) -> None:
    # Rescaling to another temperature would also need the scores of all other tokens.
    if config.temperature != 1.0 and not answers.tempered:
        raise CapabilityError(
            f"{http.address}: its scores ignore the request's temperature, so it cannot score at "
            f"{config.temperature:g}; remove teacher.temperature, or use a server with scores that "
            "follow it"
        )


def _check_pin(config: Config, answers: Probe, http: JsonClient) -> None:
    if config.canary is None:
        return
    if answers.canary_sum is None or abs(answers.canary_sum - config.canary) > PINNED:
        canary = "none" if answers.canary_sum is None else f"{answers.canary_sum:.4f}"
        raise TeacherError(
            f"{http.address}: the canary is {canary} and the recipe pins {config.canary:.4f}, so "
            "this is another model, or its scores are at another temperature; serve the model that "
            "was probed, or remove teacher.canary"
        )
