"""A teacher behind the Tinker API: a hosted model, or `practicum serve` on another machine.

In addition to the sampled token and its own candidates, it scores the student's candidates, which
each request names. It scores the student's token ids without translation.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator
from torch import Tensor

from practicum.errors import TeacherError
from practicum.objective import Sampled, Signal
from practicum.ports import (
    Capabilities,
    SamplingClient,
    StepFollower,
    Teacher,
    TeacherConfig,
    TeacherContext,
)
from practicum.remote.tinker import Connection, ServiceConfig, ServiceSampler
from practicum.remote.tinker.sampling import build_capabilities
from practicum.teaching.client import ClientTeacher
from practicum.teaching.probe import build_canary, match_canaries
from practicum.teaching.reading import ReadingConfig
from practicum.teaching.remote import find_canary_folder
from practicum.teaching.vocabulary import translate_client
from practicum.types import Sample, SampleRequest, SamplingParams, ScoreRequest, TeacherSignal

log = logging.getLogger(__name__)

TOLERANCE = 0.05
"""Nats that a canary token may move: a service's rounding depends on the rest of its batch."""


class Config(TeacherConfig, ReadingConfig, ServiceConfig):
    """The model of a service, and its renderer."""

    type: Literal["tinker"] = "tinker"
    model: str | None = Field(default=None, description="a base model's name at the service")
    model_path: str | None = Field(
        default=None, description="saved weights instead: tinker://RUN/sampler_weights/NAME"
    )
    largest_k: int = Field(default=100, ge=1, description="candidates that a signal may ask for")

    @model_validator(mode="after")
    def _check_model(self) -> "Config":
        if (self.model is None) == (self.model_path is None):
            raise ValueError("set either model (a base model's name) or model_path (saved weights)")
        if self.model_path is not None and not self.model_path.startswith("tinker://"):
            raise ValueError(
                f"model_path {self.model_path!r} is no tinker:// address; a base model is written "
                "as model"
            )
        return self

    def capabilities(self) -> Capabilities:
        """Return the sampled token, and candidates of the student or the teacher."""
        return build_capabilities(self.largest_k)


def build(config: Config, context: TeacherContext) -> Teacher:
    """Open a session, compare the vocabularies if the recipe names the tokenizer, take a canary."""
    renderer = config.build_renderer(config.url, context)
    vocabulary = renderer.vocab_size
    connection = Connection(config, "teacher")
    context.at_end.callback(connection.close)
    sampler = ServiceSampler(
        connection,
        lambda service: service.create_sampling_client(
            model_path=config.model_path, base_model=config.model
        ),
        vocabulary,
        largest_k=config.largest_k,
        meter=context.meter,
    )
    client = KnownModel(sampler, connection, config.model_path or config.model or "", vocabulary)
    log.info(f"{connection.address}: {config.model_path or config.model} scores and writes")
    scorer = context.wrap_client(client, client.find_folder)
    scorer = context.count_client(translate_client(scorer, renderer, context))
    return ClientTeacher(scorer, renderer, follower=client)


class KnownModel(StepFollower, SamplingClient):
    """A service's model, recognised by a canary after a resume and after the service's restart."""

    def __init__(
        self, sampler: SamplingClient, connection: Connection, name: str, vocabulary: int
    ) -> None:
        self._sampler = sampler
        self._connection = connection
        self._name = name
        self._request: ScoreRequest = build_canary(vocabulary)
        self._canary = self._score_canary()
        self._sessions = connection.reopened

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the service."""
        return self._sampler.capabilities

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """Sample completions of the model."""
        samples = self._sampler.sample(requests, params)
        self._check_after_restart()
        return samples

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """Score completions; TeacherError if the service restarted with another model."""
        signals = self._sampler.score(requests, signal)
        self._check_after_restart()
        return signals

    def find_folder(self, folder: Path) -> str:
        """Return the name of the folder that holds this model's answers."""
        return find_canary_folder(folder, self._name, self._canary, TOLERANCE)

    def save_state(self) -> dict[str, Tensor]:
        """Return the canary that a resumed run compares with."""
        return {"canary": self._canary}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise TeacherError if the run began with another model."""
        self._check(tensors["canary"], "since the run began")
        self._canary = tensors["canary"]

    def _check_after_restart(self) -> None:
        # A service that restarted has opened a new session, perhaps over other weights.
        if self._sessions != self._connection.reopened:
            self._sessions = self._connection.reopened
            self._check(self._score_canary(), "when the service restarted")

    def _score_canary(self) -> Tensor:
        (signal,) = self._sampler.score([self._request], Sampled())
        assert signal.logprobs is not None
        return signal.logprobs

    def _check(self, canary: Tensor, when: str) -> None:
        if not match_canaries(canary, self._canary, TOLERANCE):
            raise TeacherError(
                f"{self._connection.address}: {self._name} is another model: it changed {when}; "
                "serve the model that the run began with and resume, or start a new run"
            )
