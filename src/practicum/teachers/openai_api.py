"""A model behind somebody else's server scores: vLLM, SGLang, and others that speak OpenAI's HTTP API.

What a server can give is found out when the run starts (see `practicum probe`) and held against the recipe before anything else
happens. The tokens that are scored are the student's own; text is only sent where a server gives no scores.
"""

import logging
import os
from dataclasses import replace
from typing import Literal

from pydantic import Field

from practicum.core.randomness import seed_of
from practicum.errors import RecipeError, TeacherError
from practicum.objective import SignalName
from practicum.ports import Capabilities, Teacher, TeacherContext
from practicum.remote.http import AddressConfig, JsonClient, Server
from practicum.teachers._checks import check_texts
from practicum.teachers._client import ClientTeacher
from practicum.teachers._dialects import DialectName
from practicum.teachers._probe import Probe, probe
from practicum.teachers._reading import ReadingConfig
from practicum.teachers._remote import RemoteClient, ServerGenerator, ServerLimits, TextTeacher

log = logging.getLogger(__name__)

PINNED = 0.5
"""Nats that the canary's sum may differ from what a recipe pins: 24 tokens of half-precision rounding."""


class Config(ReadingConfig, AddressConfig):
    """Where the server is, what it may be asked, and how its model reads prompts."""

    type: Literal["openai_api"] = "openai_api"
    model: str | None = Field(
        default=None, description="its name at the server; none: the only one there"
    )
    dialect: DialectName = Field(
        default="auto", description="how scores are asked for; `chat`: it only writes"
    )
    largest_k: int = Field(
        default=20, ge=0, description="candidates that a signal may ask for; vLLM's own limit is 20"
    )
    api_key_env: str | None = Field(
        default=None, description="the environment variable that holds the key"
    )
    concurrency: int = Field(default=16, ge=1, le=1024, description="requests at once")
    timeout: float = Field(
        default=30.0, gt=0, description="seconds a request may take, besides those for its tokens"
    )
    tokens_per_second: float = Field(
        default=50.0, gt=0, description="the slowest speed of the server that is waited for"
    )
    give_up_after: float = Field(
        default=120.0, ge=0, description="seconds in which a failing request is tried again"
    )
    token_budget: int | None = Field(
        default=None, ge=1, description="tokens to be scored in all; the run stops before more"
    )
    canary_every: int = Field(
        default=16, ge=1, description="calls between two looks whether it is still the same model"
    )
    canary: float | None = Field(
        default=None, description="what `practicum probe` printed: another model is refused"
    )

    def capabilities(self) -> Capabilities:
        """What such a server gives at best; the server itself is asked when the run starts."""
        if self.dialect == "chat":
            return Capabilities(
                signals=frozenset(), supports=frozenset(), largest_k=0, follows_student=False
            )
        signals = frozenset[SignalName]({"sampled", "topk"} if self.largest_k else {"sampled"})
        return Capabilities(signals, frozenset({"teacher"}), self.largest_k, follows_student=False)


def client_of(config: Config) -> JsonClient:
    """The HTTP client of a server, with its key; RecipeError where the key's variable is empty."""
    key = None
    if config.api_key_env is not None:
        key = os.environ.get(config.api_key_env, "").strip()
        if not key or not key.isascii() or not key.isprintable():
            raise RecipeError(
                f"teacher.api_key_env: the environment variable {config.api_key_env} holds no key; set it before the run"
            )
    server = Server(
        url=config.url,
        key=key,
        allow_http=config.allow_http,
        concurrency=config.concurrency,
        give_up_after=config.give_up_after,
        seed=seed_of("http", config.url),
    )
    return JsonClient(server)


def build(config: Config, context: TeacherContext) -> Teacher:
    """Ask the server what it can do, compare vocabularies, and hold it against what the recipe pins."""
    http = client_of(config)
    renderer = config.renderer(http.address, context)
    vocabulary = renderer.vocab_size
    found = probe(http, config.dialect, config.model, config.largest_k, vocabulary)
    log.info(f"{http.address}: {'; '.join(found.lines())}")
    _check_pin(config, found, http)
    limits = ServerLimits(
        config.timeout,
        config.tokens_per_second,
        config.concurrency,
        config.token_budget,
        config.canary_every,
    )
    speaker = ServerGenerator(http, found.model, renderer, limits, context.meter)
    promised = config.capabilities()
    if found.dialect is None:
        silent = replace(promised, signals=frozenset(), supports=frozenset(), largest_k=0)
        return TextTeacher(speaker, silent, config.system)
    check_texts(found.texts or {}, renderer.tokenizer, http)
    can = promised.signals if found.largest_k else promised.signals & {"sampled"}
    client = RemoteClient(
        speaker,
        found,
        found.dialect,
        replace(promised, signals=can, largest_k=found.largest_k),
        vocabulary,
    )
    return ClientTeacher(
        context.count(context.keep(client, client.folder_in)), renderer, follows=client
    )


def _check_pin(config: Config, found: Probe, http: JsonClient) -> None:
    if config.canary is None:
        return
    if found.mark is None or abs(found.mark - config.canary) > PINNED:
        shown = "none" if found.mark is None else f"{found.mark:.4f}"
        raise TeacherError(
            f"{http.address}: the canary is {shown} and the recipe pins {config.canary:.4f}, so this is another model, or its "
            "scores are at another temperature; serve the one that was probed, or take teacher.canary away"
        )
