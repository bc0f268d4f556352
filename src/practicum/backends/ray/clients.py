"""The driver's clients: the verbs of the ports, each a request to processes of the cluster."""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from torch import Tensor

from practicum.backends.ray.calls import AnswerLimits, ask_progress, wait_for
from practicum.backends.ray.placement import end_processes
from practicum.backends.ray.references import RayHead, RayStates, WeightsReference
from practicum.costs import Meter, Phase
from practicum.errors import ModelError, PracticumError, WorkerLost
from practicum.objective import Objective, Signal
from practicum.ports import AdamParams, Capabilities, WeightUpdateRule
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

SCORED_TOKENS = 16384
"""The tokens whose hidden states are one object of the object store: tens of megabytes."""

_numbers = itertools.count(1)
"""Numbers of weights and heads, of which no two are equal in a driver."""


class RankGroup:
    """The ranks of the trainers as one: a request goes to all, and a failure of one ends all."""

    def __init__(self, processes: Sequence[Any], patience: AnswerLimits) -> None:
        self._processes = {f"trainer {rank}": process for rank, process in enumerate(processes)}
        self._patience = patience

    def load(self) -> dict[str, Any]:
        """Load the student in all ranks; return the facts about it."""
        first = next(iter(self._processes.values()))
        address_reference = first.find_address.remote()
        wait_for({"trainer 0": address_reference}, "start", self._patience)
        return self.ask("load", ray.get(address_reference), self._patience.seconds)[0]

    def ask(self, verb: str, *arguments: Any) -> list[Any]:
        """Return the answers of all ranks, in their order; they are small."""
        return [ray.get(reference) for reference in self._request(verb, arguments, {})]

    def ask_beside(self, verb: str, *arguments: Any) -> None:
        """Let all ranks do something beside their work; the group outlives a failure of it."""
        processes = self._require_processes(verb)
        references = {
            title: getattr(process, verb).remote(*arguments) for title, process in processes.items()
        }
        wait_for(references, verb, self._patience)

    def publish(self, follower: str = "") -> WeightsReference:
        """Let every rank put its part of the weights into the object store."""
        pairs = self._request("publish", (follower,), {"num_returns": 2})
        size = sum(ray.get([size for size, _ in pairs]))
        return WeightsReference(next(_numbers), tuple(part for _, part in pairs), size)

    def _request(
        self, verb: str, arguments: Sequence[Any], options: Mapping[str, Any]
    ) -> list[Any]:
        processes = self._require_processes(verb)
        references = {
            title: getattr(process, verb).options(**options).remote(*arguments)
            for title, process in processes.items()
        }
        answers = {
            title: reference[0] if options else reference for title, reference in references.items()
        }
        try:
            wait_for(answers, verb, self._patience, lambda title: ask_progress(processes[title]))
        except (PracticumError, OSError):
            # The others may wait in a collective for the one that failed.
            self._processes = {}
            end_processes(list(processes.values()))
            raise
        return list(references.values())

    def _require_processes(self, verb: str) -> dict[str, Any]:
        """Return the processes by their titles. Raises WorkerLost if they have ended."""
        if not self._processes:
            raise WorkerLost(f"{verb}: the trainers of this run have ended")
        return self._processes


class RayTrainer:
    """See `practicum.ports.TrainingClient`."""

    def __init__(self, group: RankGroup, samplers: "ModelPool") -> None:
        self.group = group
        self._samplers = samplers
        self._published: WeightsReference | None = None

    def forward_backward(
        self, data: Sequence[Datum], objective: Objective, seed: int
    ) -> ForwardResult:
        """Send every rank the batch, and return the report of all of them."""
        answers = self.group.ask("forward_backward", ray.put(list(data)), objective, seed)
        reads: Counter[str] = Counter()
        for _, counts in answers:
            reads.update(counts)
        result = answers[0][0]
        return replace(result, head_reads=dict(reads))

    def optim_step(self, params: AdamParams) -> Metrics:
        """Take a step in all ranks."""
        metrics = self.group.ask("optim_step", params)[0]
        self.forget_published()
        return metrics

    def forget_published(self) -> None:
        """Let the weights be published again before they are used: they have changed."""
        self._published = None

    def publish(self) -> WeightsReference:
        """Return the current weights; they are gathered once for each change."""
        if self._published is None:
            self._published = self.group.publish()
        return self._published

    def snapshot(self) -> "ModelClient":
        """Return a client that samples from the weights of this time."""
        weights = self.publish()
        return ModelClient(self._samplers, lambda: weights)

    def build_sampling_client(self) -> "ModelClient":
        """Return a client that samples from the current weights at each call."""
        return ModelClient(self._samplers, self.publish)

    def explain_unsupported(self, objective: Objective) -> str | None:
        """Return None: this backend trains every objective."""
        return None


class ModelPool:
    """Processes with the same model: requests are dealt to them, and answers come in order.

    Every completion has its own random stream, so it does not matter which process samples it.
    """

    def __init__(
        self,
        title: str,
        processes: Sequence[Any],
        patience: AnswerLimits,
        meter: Meter | None = None,
    ) -> None:
        self._title = title
        self._processes = processes
        self._patience = patience
        self._meter = meter
        self._heads: dict[int | None, RayHead] = {}
        self._fetched: dict[int, int] = {}

    def load(self) -> dict[str, Any]:
        """Load the model in all processes; return the facts about it."""
        references = [process.describe.remote() for process in self._processes]
        self._wait(references, "load")
        return ray.get(references[0])

    def sample(
        self,
        requests: Sequence[SampleRequest],
        params: SamplingParams,
        weights: WeightsReference | None,
    ) -> list[Sample]:
        """Sample one completion a request, in order."""
        parts = _cut(requests, len(self._processes))
        references = [
            process.sample.remote(part, params, weights)
            for process, part in zip(self._processes, parts, strict=False)
        ]
        self._wait(references, "sample")
        samples = [sample for reference in references for sample in ray.get(reference)]
        self._count_bytes("sample", sum(map(_count_sample_bytes, samples)))
        self._count_weights("sample", weights, len(parts))
        return samples

    def score(
        self, requests: Sequence[ScoreRequest], signal: Signal, weights: WeightsReference | None
    ) -> list[TeacherSignal]:
        """Score the requests; hidden states stay in the object store."""
        parts = _cut(requests, max(len(self._processes), _count_objects(requests)))
        processes = itertools.cycle(self._processes)
        references = [
            process.score.options(num_returns=2).remote(part, signal, weights)
            for process, part in zip(processes, parts, strict=False)
        ]
        self._wait([answers for answers, _ in references], "score")
        self._count_weights("score", weights, len(parts))
        signals: list[TeacherSignal] = []
        for (answers, states), part in zip(references, parts, strict=True):
            first = 0
            size, pairs = ray.get(answers)
            self._count_bytes("score", size)
            for (answer, finite), request in zip(pairs, part, strict=True):
                length = len(request.tokens)
                if answer.is_empty:
                    head = self._find_head(weights)
                    hidden = RayStates(states, first, length, finite)
                    answer = replace(answer, hidden=hidden, head=head)
                signals.append(answer)
                first += length
        return signals

    def _find_head(self, weights: WeightsReference | None) -> RayHead:
        """Return the head of the weights by reference; only the newest one is kept here."""
        number = None if weights is None else weights.number
        if number not in self._heads:
            reference, size = self._processes[0].pack_head.options(num_returns=2).remote(weights)
            self._wait([size], "pack_head")
            self._heads = {number: RayHead(reference, next(_numbers), ray.get(size))}
        return self._heads[number]

    def _count_bytes(self, phase: Phase, size: int) -> None:
        if self._meter is not None:
            self._meter.count_bytes(phase, size)

    def _count_weights(self, phase: Phase, weights: WeightsReference | None, parts: int) -> None:
        """Count the weights once for each process that had not fetched them yet."""
        if weights is None:
            return
        new = [
            n
            for n in range(min(parts, len(self._processes)))
            if self._fetched.get(n) != weights.number
        ]
        self._fetched |= dict.fromkeys(new, weights.number)
        self._count_bytes(phase, weights.size * len(new))

    def _wait(self, references: Sequence[Any], verb: str) -> None:
        count = len(self._processes)
        # A process may have several requests, which it answers in order.
        titles = {
            f"{self._title} {number % count}, request {number // count}": reference
            for number, reference in enumerate(references)
        }
        wait_for(titles, verb, self._patience)


def _cut(requests: Sequence[Any], count: int) -> list[list[Any]]:
    """Cut requests into at most `count` parts of neighbours, which share their prompts."""
    size = -(-len(requests) // count) if requests else 1
    return [list(requests[start : start + size]) for start in range(0, len(requests), size)]


def _count_sample_bytes(sample: Sample) -> int:
    return sample.tokens.nbytes + sample.sampling_logprobs.nbytes + sample.policy_logprobs.nbytes


def _count_objects(requests: Sequence[ScoreRequest]) -> int:
    return -(-sum(len(request.tokens) for request in requests) // SCORED_TOKENS)


@dataclass(frozen=True, slots=True)
class ModelClient:
    """A `practicum.ports.SamplingClient` of a pool, with the weights that a function returns."""

    pool: ModelPool
    get_weights: Callable[[], WeightsReference | None]
    no_sampling_reason: str = ""

    @property
    def capabilities(self) -> Capabilities:
        """Every signal: the full distribution is known."""
        return Capabilities(
            signals=frozenset({"sampled", "topk", "full"}), follows_student=False, raw_logits=True
        )

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """Sample one completion a request, in order."""
        if self.no_sampling_reason:
            raise ModelError(self.no_sampling_reason)
        return self.pool.sample(requests, params, self.get_weights()) if requests else []

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """Score each request's tokens."""
        return self.pool.score(requests, signal, self.get_weights()) if requests else []


class RaySelfTeacher:
    """See `practicum.ports.SelfTeacher`; its rows follow the student's in each rank."""

    def __init__(
        self, trainer: RayTrainer, samplers: ModelPool, rule: WeightUpdateRule, name: str
    ) -> None:
        self._trainer = trainer
        self._rule = rule.hold_within_step()
        self._name = name
        self._published: WeightsReference | None = None
        self._client = ModelClient(samplers, self._publish)
        if self._rule.weights == "frozen":
            self._published = trainer.publish()
        elif self._rule.weights != "live":
            trainer.group.ask("begin_following", name)

    @property
    def capabilities(self) -> Capabilities:
        """Every signal, but only at its own step: the weights follow the student's."""
        return replace(self._client.capabilities, follows_student=True)

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """Sample one completion a request, in order."""
        return self._client.sample(requests, params)

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """Score each request's tokens."""
        return self._client.score(requests, signal)

    def after_step(self, step: int, data: Sequence[Datum]) -> None:
        """Follow the student."""
        if self._rule.weights in ("ema", "periodic"):
            self._trainer.group.ask("follow", self._name, self._rule, step)
            self._published = None

    def save_state(self) -> dict[str, Tensor]:
        """Return the teacher's weights if they changed since the start."""
        if self._rule.weights not in ("ema", "periodic"):
            return {}
        return {name: packed.to_tensor() for name, packed in self._publish().fetch().items()}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the teacher's weights."""
        if tensors:
            self._trainer.group.ask("load_follower", self._name, ray.put(dict(tensors)))
            self._published = None

    def _publish(self) -> WeightsReference:
        if self._rule.weights == "live":
            return self._trainer.publish()
        if self._published is None:
            self._published = self._trainer.group.publish(self._name)
        return self._published
