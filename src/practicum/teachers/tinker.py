"""A model of a service that speaks the Tinker API scores: hosted, or `practicum serve` on another machine.

Besides the sampled token and its own candidates it scores the student's: the tokens are named with the request. What is scored are
the student's own token ids.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator
from torch import Tensor

from practicum.errors import TeacherError
from practicum.objective import Sampled, Signal
from practicum.ports import Capabilities, SamplingClient, StepFollower, Teacher, TeacherContext
from practicum.remote.tinker import Connection, ServiceConfig, ServiceSampler
from practicum.remote.tinker.sampling import service_capabilities
from practicum.teachers._client import ClientTeacher
from practicum.teachers._probe import canary_of, difference
from practicum.teachers._reading import ReadingConfig
from practicum.teachers._remote import canary_folder
from practicum.types import Sample, SampleRequest, SamplingParams, ScoreRequest, TeacherSignal

log = logging.getLogger(__name__)

TOLERANCE = 0.05
"""Nats that a token of the canary may move: a service's rounding depends on what shares the batch."""


class Config(ReadingConfig, ServiceConfig):
    """Which model of a service scores, and how it reads prompts."""

    type: Literal["tinker"] = "tinker"
    model: str | None = Field(default=None, description="a base model's name at the service")
    model_path: str | None = Field(
        default=None, description="saved weights instead: tinker://RUN/sampler_weights/NAME"
    )
    largest_k: int = Field(default=100, ge=1, description="candidates that a signal may ask for")

    @model_validator(mode="after")
    def _one_model(self) -> "Config":
        if (self.model is None) == (self.model_path is None):
            raise ValueError(
                "write model, a base model's name, or model_path, saved weights: one of the two"
            )
        if self.model_path is not None and not self.model_path.startswith("tinker://"):
            raise ValueError(
                f"model_path {self.model_path!r} is no tinker:// address; a base model is written as model"
            )
        return self

    def capabilities(self) -> Capabilities:
        """The sampled token, and candidates of either side."""
        return service_capabilities(self.largest_k)


def build(config: Config, context: TeacherContext) -> Teacher:
    """Begin a session, compare vocabularies where the recipe names the tokenizer, and note what the model is known by."""
    renderer = config.renderer(config.url, context)
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
    return ClientTeacher(
        context.count(context.keep(client, client.folder_in)), renderer, follows=client
    )


class KnownModel(StepFollower):
    """A service's model that is recognised by a canary: at a resume, and when the service was started again.

    See `practicum.ports.SamplingClient`.
    """

    def __init__(
        self, sampler: SamplingClient, connection: Connection, name: str, vocabulary: int
    ) -> None:
        self.capabilities = sampler.capabilities
        """Those of the service."""
        self._sampler = sampler
        self._connection = connection
        self._name = name
        self._sequence: ScoreRequest = canary_of(vocabulary)
        self._canary = self._look()
        self._seen = connection.reopened

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """The model's own answers."""
        samples = self._sampler.sample(requests, params)
        self._recognise()
        return samples

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """What the model says; TeacherError where the service was started again with another one."""
        signals = self._sampler.score(requests, signal)
        self._recognise()
        return signals

    def folder_in(self, place: Path) -> str:
        """The name of the folder of this model's answers."""
        return canary_folder(place, self._name, self._canary, self._is_same)

    def save_state(self) -> dict[str, Tensor]:
        """What a resumed run compares with."""
        return {"canary": self._canary}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """TeacherError where the model is another one than that of the run."""
        self._check(tensors["canary"], "since the run began")
        self._canary = tensors["canary"]

    def _recognise(self) -> None:
        """Look again where a new session was begun."""
        if self._seen != self._connection.reopened:
            self._seen = self._connection.reopened
            self._check(self._look(), "when the service was started again")

    def _look(self) -> Tensor:
        (said,) = self._sampler.score([self._sequence], Sampled())
        assert said.logprobs is not None
        return said.logprobs

    def _is_same(self, canary: Tensor) -> bool:
        return canary.shape == self._canary.shape and difference(canary, self._canary) <= TOLERANCE

    def _check(self, canary: Tensor, when: str) -> None:
        if not self._is_same(canary):
            raise TeacherError(
                f"{self._connection.address}: {self._name} is another model: it changed {when}; serve the one that the run began "
                "with and resume, or start a new run"
            )
