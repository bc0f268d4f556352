"""Implement the ports in the driver; each method is a request to processes of the cluster."""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import ray
from jaxtyping import Float
from torch import Tensor

from practicum.backends._sharded.following import ShardedSelfTeacher
from practicum.backends._sharded.rank_verbs import ModelSettings
from practicum.backends.ray.calls import AnswerLimits, ask_progress, call_within, wait_for
from practicum.backends.ray.placement import end_processes
from practicum.backends.ray.references import (
    PackedAnswers,
    RayHead,
    WeightsReference,
    open_signals,
    refer_to_state,
)
from practicum.costs import Meter, Phase
from practicum.errors import ModelError, PracticumError, WorkerLost
from practicum.models.digests import ModelRecord
from practicum.models.tensors import SavedTensor
from practicum.objective import EVERY_SIGNAL, Objective, Signal
from practicum.ports import (
    AdamParams,
    Capabilities,
    SamplingClient,
    ScalarModel,
    WeightUpdateRule,
)
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

T = TypeVar("T")

SCORED_TOKENS = 16384
"""The number of tokens with hidden states in one object of the object store: tens of megabytes."""

_numbers = itertools.count(1)
"""Numbers of weights and heads, each unique in a driver."""


class RankGroup:
    """Ranks that hold sharded models; requests go to all ranks, and the failure of one ends all."""

    def __init__(self, title: str, processes: Sequence[Any], patience: AnswerLimits) -> None:
        self._processes = {f"{title} {rank}": process for rank, process in enumerate(processes)}
        self._patience = patience
        self.count = len(processes)
        if patience.pulse is not None:
            for name, process in self._processes.items():
                patience.pulse.watch(name, process)
        self._has_met = False
        self._turn = Lock()

    def meet(self) -> None:
        """Connect the ranks to each other, unless they are connected already."""
        if self._has_met:
            return
        self._has_met = True
        title, first = next(iter(self._processes.items()))
        address_reference = first.find_address.remote()
        starting = self._patience.for_start()
        wait_for({title: address_reference}, "start", starting)
        address = self._fetch(address_reference, "start")
        # Use the limits of a start: a rank may start or load late.
        self._request("meet", [(address, self._patience.seconds)] * self.count, limits=starting)

    def ask(self, verb: str, *arguments: Any) -> list[Any]:
        """Return the answers of all ranks, in rank order; the answers are small."""
        references = self._request(verb, [arguments] * self.count)
        return [self._fetch(reference, verb) for reference in references]

    def load(self, verb: str, *arguments: Any) -> list[Any]:
        """Ask all ranks to load a model, with the timeout of a start."""
        limits = self._patience.for_start()
        references = self._request(verb, [arguments] * self.count, limits=limits)
        return [self._fetch(reference, verb) for reference in references]

    def ask_each(self, verb: str, arguments: Sequence[Sequence[Any]]) -> list[tuple[Any, Any]]:
        """Ask each rank with its own arguments; return a small answer and a reference per rank."""
        pairs = self._request(verb, arguments, {"num_returns": 2})
        return [(self._fetch(answer, verb), reference) for answer, reference in pairs]

    def put(self, content: Any, verb: str) -> Any:
        """Put an argument that all ranks read into the object store; return its reference."""
        return call_within(lambda: ray.put(content), verb, self._patience)

    def _fetch(self, reference: Any, verb: str) -> Any:
        return call_within(lambda: ray.get(reference), verb, self._patience)

    def ask_concurrently(self, verb: str, *arguments: Any) -> None:
        """Let all ranks do a side task; the group survives a failure of it."""
        processes = self._require_processes(verb)
        references = {
            title: getattr(process, verb).remote(*arguments) for title, process in processes.items()
        }
        wait_for(references, verb, self._patience)

    def publish(self, follower: str = "") -> WeightsReference:
        """Let every rank put its part of the weights into the object store."""
        pairs = self.ask_each("publish", [(follower,)] * self.count)
        sizes, parts = zip(*pairs, strict=True)
        return WeightsReference(next(_numbers), parts, sizes)

    def _request(
        self,
        verb: str,
        arguments: Sequence[Sequence[Any]],
        options: Mapping[str, Any] | None = None,
        limits: AnswerLimits | None = None,
    ) -> list[Any]:
        limits = limits or self._patience
        # Threads take turns: the ranks would deadlock if they received requests in different
        # orders.
        with self._turn:
            processes = self._require_processes(verb)
            references = call_within(
                lambda: {
                    title: getattr(process, verb).options(**options or {}).remote(*values)
                    for (title, process), values in zip(processes.items(), arguments, strict=True)
                },
                verb,
                limits,
            )
        answers = {
            title: reference[0] if options else reference for title, reference in references.items()
        }
        try:
            wait_for(answers, verb, limits, lambda title: ask_progress(processes[title]))
        except (PracticumError, OSError):
            # The remaining ranks may wait in a collective for the failed rank.
            self._processes = {}
            end_processes(list(processes.values()))
            raise
        return list(references.values())

    def _require_processes(self, verb: str) -> dict[str, Any]:
        """Return the processes by their titles. Raises WorkerLost if they have ended."""
        if not self._processes:
            raise WorkerLost(f"{verb}: the processes of this run have ended")
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
        batch = self.group.put(list(data), "forward_backward")
        answers = self.group.ask("forward_backward", batch, objective, seed)
        reads: Counter[str] = Counter()
        for _, counts in answers:
            reads.update(counts)
        result = answers[0][0]
        return replace(result, head_reads=dict(reads))

    def optim_step(self, params: AdamParams) -> Metrics:
        """Take a step in all ranks."""
        metrics = self.group.ask("optim_step", params)[0]
        self.forget_published()
        canary = self._samplers.canary
        return metrics if canary is None else {**metrics, "canary": canary}

    def forget_published(self) -> None:
        """Note that the weights have changed and must be published again before use."""
        self._published = None

    def publish(self) -> WeightsReference:
        """Return the current weights; they are gathered once for each change."""
        if self._published is None:
            self._published = self.group.publish()
        return self._published

    def snapshot(self) -> "ModelClient":
        """Return a client that samples from the current weights, also after later steps."""
        weights = self.publish()
        return ModelClient(self._samplers, lambda: weights)

    def build_sampling_client(self) -> "ModelClient":
        """Return a client that samples from the current weights at each call."""
        return ModelClient(self._samplers, self.publish)

    def explain_unsupported(self, objective: Objective) -> str | None:
        """Return None: this backend trains every objective."""
        return None


class ModelPool:
    """Processes with the same model; requests are distributed, and answers are returned in order.

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
        self._record: ModelRecord | None = None
        if patience.pulse is not None:
            for number, process in enumerate(processes):
                patience.pulse.watch(f"{title} {number}", process)
        self.canary: float | None = None
        """The largest weight difference of the engines at the newest request; None: no engine."""

    def load(self, record: ModelRecord | None) -> dict[str, Any]:
        """Load the model in all processes from the recorded files; return the facts about it."""
        references = [process.describe.remote(record) for process in self._processes]
        self._wait(references, "load", self._patience.for_start())
        facts = self._fetch(references[0], "load")
        self._record = facts["record"]
        return facts

    def sample(
        self,
        requests: Sequence[SampleRequest],
        params: SamplingParams,
        weights: WeightsReference | None,
    ) -> list[Sample]:
        """Sample one completion per request, in order."""
        parts = _cut(requests, len(self._processes))
        references = self._call(
            lambda: [
                process.sample.remote(part, params, weights, self._record)
                for process, part in zip(self._processes, parts, strict=False)
            ],
            "sample",
        )
        self._wait(references, "sample")
        answers = self._fetch(references, "sample")
        samples = [sample for part, _ in answers for sample in part]
        differences = [difference for _, difference in answers if difference is not None]
        self.canary = max(differences, default=self.canary)
        self._count_bytes("sample", sum(map(_count_sample_bytes, samples)))
        self._count_weights("sample", weights, len(parts))
        return samples

    def score(
        self, requests: Sequence[ScoreRequest], signal: Signal, weights: WeightsReference | None
    ) -> list[TeacherSignal]:
        """Score the requests; hidden states stay in the object store."""
        parts = _cut(requests, max(len(self._processes), _count_objects(requests)))
        processes = itertools.cycle(self._processes)
        references = self._call(
            lambda: [
                process.score.options(num_returns=2).remote(part, signal, weights, self._record)
                for process, part in zip(processes, parts, strict=False)
            ],
            "score",
        )
        self._wait([answers for answers, _ in references], "score")
        self._count_weights("score", weights, len(parts))
        signals: list[TeacherSignal] = []
        for (answer, states), part in zip(references, parts, strict=True):
            answers: PackedAnswers = self._fetch(answer, "score")
            self._count_bytes("score", answers[0])
            signals += open_signals(answers, states, part, lambda: self._find_head(weights))
        return signals

    def _find_head(self, weights: WeightsReference | None) -> RayHead:
        """Return the head of the weights by reference; only the newest head is kept here."""
        number = None if weights is None else weights.number
        if number not in self._heads:
            ask = self._processes[0].pack_head.options(num_returns=2)
            reference, size = ask.remote(weights, self._record)
            self._wait([size], "pack_head")
            self._heads = {
                number: RayHead(reference, next(_numbers), self._fetch(size, "pack_head"))
            }
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

    def _call(self, call: Callable[[], T], verb: str) -> T:
        return call_within(call, verb, self._patience)

    def _fetch(self, reference: Any, verb: str) -> Any:
        return self._call(lambda: ray.get(reference), verb)

    def _wait(
        self, references: Sequence[Any], verb: str, limits: AnswerLimits | None = None
    ) -> None:
        count = len(self._processes)
        # A process may have several requests, which it answers in order.
        titles = {
            f"{self._title} {number % count}, request {number // count}": reference
            for number, reference in enumerate(references)
        }
        wait_for(titles, verb, limits or self._patience)


def _cut(requests: Sequence[Any], count: int) -> list[list[Any]]:
    """Split requests into at most `count` parts of neighbours, which share their prompts."""
    size = -(-len(requests) // count) if requests else 1
    return [list(requests[start : start + size]) for start in range(0, len(requests), size)]


def _count_sample_bytes(sample: Sample) -> int:
    return sample.tokens.nbytes + sample.sampling_logprobs.nbytes + sample.policy_logprobs.nbytes


def _count_objects(requests: Sequence[ScoreRequest]) -> int:
    return -(-sum(len(request.tokens) for request in requests) // SCORED_TOKENS)


@dataclass(frozen=True, slots=True)
class ModelClient(SamplingClient):
    """A `practicum.ports.SamplingClient` for a pool, with the weights that a function returns."""

    pool: ModelPool
    get_weights: Callable[[], WeightsReference | None]
    no_sampling_reason: str = ""

    @property
    def capabilities(self) -> Capabilities:
        """Every signal: the full distribution is known."""
        return EVERY_SIGNAL

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """Sample one completion per request, in order."""
        if self.no_sampling_reason:
            raise ModelError(self.no_sampling_reason)
        return self.pool.sample(requests, params, self.get_weights()) if requests else []

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """Score each request's tokens."""
        return self.pool.score(requests, signal, self.get_weights()) if requests else []


class ShardedTeacher(SamplingClient):
    """A `practicum.ports.SamplingClient` for a sharded teacher; its ranks share the requests."""

    def __init__(self, group: RankGroup, model: ModelSettings, meter: Meter | None = None) -> None:
        self._group = group
        self._model = model
        self._meter = meter
        self._head: RayHead | None = None
        self._no_sampling_reason = ""

    def load(self) -> dict[str, Any]:
        """Load the teacher in all ranks; return the facts about it."""
        facts = self._group.load("load_scorer", self._model)[0]
        self._no_sampling_reason = facts["no_sampling_reason"]
        return facts

    @property
    def capabilities(self) -> Capabilities:
        """Every signal: the full distribution is known."""
        return Capabilities(signals=frozenset({"sampled", "topk", "full"}), follows_student=False)

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """Raise an error: each token would take as many gathers as a pass over all texts."""
        raise ModelError(self._no_sampling_reason)

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """Score the requests; hidden states stay in the object store."""
        signals: list[TeacherSignal] = []
        count = self._group.count
        for part in _cut(requests, -(-_count_objects(requests) // count)):
            shares = _cut(part, count)
            shares += [[]] * (count - len(shares))
            name = self._model.name
            answers = self._group.ask_each("score", [(name, share, signal) for share in shares])
            for ((size, pairs), states), share in zip(answers, shares, strict=True):
                if self._meter is not None:
                    self._meter.count_bytes("score", size)
                signals += open_signals((size, pairs), states, share, self._find_head)
        return signals

    def _find_head(self) -> RayHead:
        """Return the head by reference; it never changes and is gathered only once."""
        if self._head is None:
            arguments = [(self._model.name,)] * self._group.count
            size, reference = self._group.ask_each("pack_head", arguments)[0]
            self._head = RayHead(reference, next(_numbers), size)
        return self._head


class RayScalar(ScalarModel):
    """A `practicum.ports.ScalarModel` in a separate process; only numbers are transferred."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def predict(self, texts: Sequence[ScoreRequest]) -> list[Float[Tensor, " _"]]:
        """Return the output at the state before each of a text's tokens."""
        return self._group.ask("predict", list(texts))[0] if texts else []

    def fit(
        self,
        texts: Sequence[ScoreRequest],
        slopes: Sequence[Float[Tensor, " _"]],
        params: AdamParams,
    ) -> Metrics:
        """Take one AdamW step along the negative slopes."""
        # Pickling a slice of a tensor would send the full tensor.
        return self._group.ask("fit", list(texts), [slope.clone() for slope in slopes], params)[0]

    def save_state(self) -> Mapping[str, SavedTensor]:
        """Return the trained weights and AdamW's moments, by reference."""
        return refer_to_state(*self._group.ask_each("pack_state", [()])[0])

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore weights and moments."""
        if tensors:
            self._group.ask("load_state", self._group.put(dict(tensors), "load_state"))


class RaySelfTeacher(ShardedSelfTeacher[WeightsReference]):
    """The student as its own teacher; samplers answer with its published weights."""

    def __init__(
        self, trainer: RayTrainer, samplers: ModelPool, rule: WeightUpdateRule, name: str
    ) -> None:
        self._trainer = trainer
        super().__init__(rule, name, trainer.group.ask, partial(ModelClient, samplers))

    def gather_student(self) -> WeightsReference:
        """Publish the student's weights once a step."""
        return self._trainer.publish()

    def keep_student(self) -> WeightsReference:
        """Publish the student's weights; a reference never changes."""
        return self._trainer.publish()

    def gather_follower(self) -> WeightsReference:
        """Publish the weights that follow the student's."""
        return self._trainer.group.publish(self._name)

    def read(self, weights: WeightsReference) -> Mapping[str, SavedTensor]:
        """Return the tensors of published weights by reference."""
        parts = map(refer_to_state, weights.sizes, weights.references)
        return {name: tensor for part in parts for name, tensor in part.items()}

    def pack(self, tensors: dict[str, Tensor]) -> Any:
        """Return a reference to the tensors, which the driver does not send itself."""
        return self._trainer.group.put(tensors, "load_follower")
