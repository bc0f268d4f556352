"""A trainer with a student that samples through an engine, and the check of all transferred weights.

The engine has the trainer's weights before any token is sampled: each change of the student is
handed over at the next call, and a fixed text, the canary, must then have the same
log-probabilities in both. A stale weight is detected only if old and new values differ enough, so
the first hand-over is a rehearsal with weights far from the student's.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from time import monotonic

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.core.randomness import seed_of
from practicum.errors import EngineError
from practicum.objective import Objective, Sampled, Signal
from practicum.ports import AdamParams, Capabilities, SamplingClient, TrainingClient
from practicum.ports.engines import SamplingEngine
from practicum.types import (
    Datum,
    ForwardResult,
    Metrics,
    Sample,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    TeacherSignal,
)

log = logging.getLogger(__name__)

CANARY_PROMPT, CANARY_TOKENS = 8, 24
"""The canary's numbers of prompt tokens and scored tokens."""

TOLERANCES = {torch.float32: 0.01}
"""The nats by which a log-probability of the canary may differ, by the engine's dtype."""

HALF_PRECISION_TOLERANCE = 0.3
"""The same for 16 bits: a logit of 16 to 32 is rounded by up to 0.06 in bfloat16, at both ends."""

Gather = Callable[[SamplingClient], Mapping[str, Tensor]]
"""Returns all weights of a sampling client of the backend, by their names in the model's files."""


def build_canary(vocab_size: int, max_tokens: int) -> ScoreRequest:
    """Return a fixed text of random tokens; most of them are scored.

    Random tokens are unlikely, so their log-probabilities are sensitive to every weight.
    """
    length = min(CANARY_PROMPT + CANARY_TOKENS, max_tokens - 1)
    stream = torch.Generator().manual_seed(seed_of("canary"))
    tokens = tuple(torch.randint(vocab_size, (length,), generator=stream).tolist())
    split = min(CANARY_PROMPT, length - 1)
    return ScoreRequest(tokens[:split], tokens[split:])


@dataclass
class WeightKeeper:
    """Keep an engine's weights equal to the student's, and raise EngineError if they are not.

    Calls may come from several threads: the engine has one set of weights, so they take turns.
    """

    engine: SamplingEngine
    gather: Gather
    rehearse: Callable[[], SamplingClient]
    """Return a client with all trainable weights far from the student's."""
    canary: ScoreRequest
    tolerance: float
    difference: float = 0.0
    """The canary's largest difference after the newest hand-over, in nats."""
    seconds: float = 0.0
    """The seconds of the newest hand-over and its check."""
    _version: int | None = None
    _expected: Float[Tensor, " T"] | None = None
    _rehearsed: bool = False
    _lock: Lock = field(default_factory=Lock)

    def sample(
        self,
        client: SamplingClient,
        version: int,
        requests: Sequence[SampleRequest],
        params: SamplingParams,
    ) -> list[Sample]:
        """Sample by the engine with the client's weights, which `version` numbers."""
        with self._lock:
            if self._version != version or not self._is_cached():
                self._bring(client, version)
            return self.engine.sample(requests, params)

    def free_memory(self) -> None:
        """Let the engine make room for a training step."""
        with self._lock:
            if self.engine.free_memory():
                self._version = None

    def _is_cached(self) -> bool:
        """Return True if the engine still has the weights that it was given."""
        if not self.engine.may_lose_weights:
            return True
        is_same = self._measure() <= self.tolerance
        if not is_same:
            log.info(
                f"{self.engine.name}: it lost the student's weights (a restart, or another run "
                "that uses the same server); they are handed over again"
            )
        return is_same

    def _bring(self, client: SamplingClient, version: int) -> None:
        """Hand over the client's weights, with a rehearsal before the first hand-over."""
        # Unknown until the check has passed: a failed hand-over may have replaced half of them.
        self._version = None
        if not self._rehearsed:
            self._hand_over(self.rehearse(), "in a rehearsal with other weights")
            self._rehearsed = True
        start = monotonic()
        self._hand_over(client, f"after weights {version} were handed over")
        self.seconds = monotonic() - start
        self._version = version

    def _hand_over(self, client: SamplingClient, when: str) -> None:
        self.engine.load_weights(self.gather(client))
        (signal,) = client.score([self.canary], Sampled())
        assert signal.logprobs is not None, "a sampled signal has log-probabilities"
        self._expected = signal.logprobs
        self.difference = self._measure()
        # By `not`, so that NaN is no agreement.
        if not self.difference <= self.tolerance:
            raise EngineError(
                f"rollout.engine: {self.engine.name} does not sample with the student's weights: "
                f"{when}, the log-probabilities of a fixed text differ by {self.difference:.2g} "
                f"nats from the trainer's, and {self.tolerance:g} is rounding; nothing was learned "
                "from it; leave rollout.engine out, or set rollout.engine.tolerance if this model "
                "rounds so coarsely"
            )

    def _measure(self) -> float:
        """Return the canary's largest difference between engine and trainer, in nats."""
        assert self._expected is not None, "the trainer scored the canary first"
        scores = self.engine.score(self.canary)
        return (scores - self._expected).abs().max().item()


@dataclass(frozen=True, slots=True)
class EngineSampler(SamplingClient):
    """Samples by an engine and scores by the backend's own client; see `SamplingClient`."""

    keeper: WeightKeeper
    client: SamplingClient
    read_version: Callable[[], int]
    """Return the number of the client's weights."""

    @property
    def capabilities(self) -> Capabilities:
        """The signals of the backend's own client."""
        return self.client.capabilities

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """Sample one completion per request with the client's current weights."""
        if not requests:
            return []
        return self.keeper.sample(self.client, self.read_version(), requests, params)

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """Score with the backend's own client, because an engine gives no hidden states."""
        return self.client.score(requests, signal)


class EngineTrainer:
    """A trainer with a student that samples by an engine; see `practicum.ports.TrainingClient`."""

    def __init__(self, trainer: TrainingClient, keeper: WeightKeeper, live: SamplingClient) -> None:
        self._trainer = trainer
        self._keeper = keeper
        self._live = live
        self._changes = 0

    @property
    def engine_name(self) -> str:
        """The engine's program and version."""
        return self._keeper.engine.name

    def mark_changed(self) -> None:
        """Note that the student's weights changed: the engine gets them before it next samples."""
        self._changes += 1

    def build_sampling_client(self) -> EngineSampler:
        """Return a client that samples with the live weights at each call."""
        return EngineSampler(self._keeper, self._live, lambda: self._changes)

    def snapshot(self) -> EngineSampler:
        """Return a client that samples with a copy of the current weights."""
        version = self._changes
        return EngineSampler(self._keeper, self._trainer.snapshot(), lambda: version)

    def forward_backward(
        self, data: Sequence[Datum], objective: Objective, seed: int
    ) -> ForwardResult:
        """Accumulate the gradient, with the memory that the engine can spare."""
        self._keeper.free_memory()
        return self._trainer.forward_backward(data, objective, seed)

    def optim_step(self, params: AdamParams) -> Metrics:
        """Take one step, and add how well the engine's weights agreed before it."""
        metrics = self._trainer.optim_step(params)
        self.mark_changed()
        return {**metrics, "canary": self._keeper.difference}

    def explain_unsupported(self, objective: Objective) -> str | None:
        """Explain why the trainer cannot train the objective; return None if it can."""
        return self._trainer.explain_unsupported(objective)


def choose_tolerance(tolerance: float | None, dtype: torch.dtype) -> float:
    """Return the allowed difference of the canary in nats, by the dtype if none is set."""
    return TOLERANCES.get(dtype, HALF_PRECISION_TOLERANCE) if tolerance is None else tolerance
