"""Use a sharded student as its own teacher, for any program that starts the processes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from torch import Tensor

from practicum.models.tensors import SavedTensor
from practicum.objective import Capabilities, Signal
from practicum.ports import (
    SamplingClient,
    SelfTeacher,
    WeightUpdateRule,
)
from practicum.types import (
    Datum,
    Sample,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    TeacherSignal,
)

Weights = TypeVar("Weights")
"""The name or reference by which the client takes weights."""


class ShardedSelfTeacher(SelfTeacher, ABC, Generic[Weights]):
    """A self-teacher that keeps rows in each rank, updated from the student's rows.

    `ask` sends one request to all ranks. `build_client` makes a client from a function that returns
    the weights.
    """

    def __init__(
        self,
        rule: WeightUpdateRule,
        name: str,
        ask: Callable[..., Any],
        build_client: Callable[[Callable[[], Weights]], SamplingClient],
    ) -> None:
        self._rule = rule.hold_within_step()
        self._name = name
        self._ask = ask
        self._newest: Weights | None = None
        self._client = build_client(self._find_weights)
        if self._rule.weights == "frozen":
            self._newest = self.keep_student()
        elif self._rule.weights != "live":
            ask("begin_following", name)

    @abstractmethod
    def gather_student(self) -> Weights:
        """Return the student's current weights."""

    @abstractmethod
    def keep_student(self) -> Weights:
        """Return a copy of the student's current weights, which later steps do not change."""

    @abstractmethod
    def gather_follower(self) -> Weights:
        """Return the weights that follow the student's."""

    @abstractmethod
    def read(self, weights: Weights) -> Mapping[str, SavedTensor]:
        """Return the tensors of some weights, to be saved."""

    @abstractmethod
    def pack(self, tensors: dict[str, Tensor]) -> Any:
        """Return tensors in the form that the ranks accept."""

    @property
    def capabilities(self) -> Capabilities:
        """Every signal, but only at the current step: the weights follow the student's."""
        return replace(self._client.capabilities, follows_student=True)

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """Sample one completion per request, in order."""
        return self._client.sample(requests, params)

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """Score each request's tokens."""
        return self._client.score(requests, signal)

    def after_step(self, step: int, data: Sequence[Datum]) -> None:
        """Follow the student."""
        if self._rule.weights in ("ema", "periodic"):
            self._ask("follow", self._name, self._rule, step)
            self._newest = None

    def save_state(self) -> Mapping[str, SavedTensor]:
        """Return the teacher's weights if they changed since the start."""
        return self.read(self._find_weights()) if self._rule.weights in ("ema", "periodic") else {}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the teacher's weights."""
        if tensors:
            self._ask("load_follower", self._name, self.pack(dict(tensors)))
            self._newest = None

    def _find_weights(self) -> Weights:
        if self._rule.weights == "live":
            return self.gather_student()
        if self._newest is None:
            self._newest = self.gather_follower()
        return self._newest
