"""Clients that count what is asked of them; see `practicum.costs`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from practicum.costs import CountedHead, Learning, Meter, Shape, Work, read_once
from practicum.objective import Objective, Signal
from practicum.ports import (
    AdamParams,
    LockstepClient,
    MixedRequest,
    Reading,
    SamplingClient,
    ScoreRequest,
    SelfRule,
    SelfTeacher,
    TrainingClient,
)
from practicum.types import Datum, ForwardResult, Metrics, Sample, SampleRequest, SamplingParams, TeacherSignal


def counted(
    requests: Sequence[ScoreRequest], answers: Sequence[TeacherSignal], meter: Meter | None
) -> list[TeacherSignal]:
    """The answers, their scoring counted; a head that they bring along counts for itself wherever it is applied."""
    if meter is None or not requests:
        return list(answers)
    texts = [(request.prompt_tokens, len(request.tokens)) for request in requests]
    meter.scored(texts, heads=any(answer.hidden is None for answer in answers))
    heads = {id(answer.head): CountedHead(answer.head, meter) for answer in answers if answer.head is not None}
    return [answer if answer.head is None else replace(answer, head=heads[id(answer.head)]) for answer in answers]


def metered(client: SamplingClient, meter: Meter) -> "MeteredSampler":
    """The client, counting; it decodes in lockstep where the client can."""
    return MeteredLockstep(client, meter) if isinstance(client, LockstepClient) else MeteredSampler(client, meter)


class MeteredSampler:
    """Counts the texts that are drawn and scored; see `practicum.ports.SamplingClient`."""

    def __init__(self, client: SamplingClient, meter: Meter) -> None:
        self._client = client
        self._meter = meter

    @property
    def capabilities(self):  # type: ignore[no-untyped-def]
        """Those of the client."""
        return self._client.capabilities

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """What the client draws."""
        samples = self._client.sample(requests, params)
        self._wrote(requests, samples)
        return samples

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """What the client says."""
        return counted(requests, self._client.score(requests, signal), self._meter)

    def _wrote(self, requests: Sequence[SampleRequest] | Sequence[MixedRequest], samples: Sequence[Sample]) -> None:
        pairs = zip(requests, samples, strict=True)
        self._meter.wrote([(request.prompt_tokens, len(sample.tokens)) for request, sample in pairs])


class MeteredLockstep(MeteredSampler):
    """The same over a client that decodes in lockstep with another, whose own part is counted by whoever asked for it."""

    _client: LockstepClient  # type: ignore[assignment]

    def read(self, prompts: Sequence[tuple[int, ...]], rows: int, new_tokens: int) -> Reading:
        """What the client reads; who draws from it counts."""
        return self._client.read(prompts, rows, new_tokens)

    def sample_mixed(
        self, requests: Sequence[MixedRequest], teacher: LockstepClient, share: float, params: SamplingParams
    ) -> list[Sample]:
        """What the two draw."""
        samples = self._client.sample_mixed(requests, teacher, share, params)
        self._wrote(requests, samples)
        return samples


class MeteredTrainer:
    """Counts what the student draws and learns from; see `practicum.ports.TrainingClient`.

    Of a student whose shape is not known the tokens alone are counted.
    """

    def __init__(self, trainer: TrainingClient, shape: Shape | None, learning: Learning | None, meter: Meter) -> None:
        self._trainer = trainer
        self._shape = shape
        self._learning = learning
        self._meter = meter

    def forward_backward(self, data: Sequence[Datum], objective: Objective, seed: int) -> ForwardResult:
        """The gradient of the objective."""
        result = self._trainer.forward_backward(data, objective, seed)
        self._meter.ledger.add("update", self._meter.name, self._work(data, objective, "recomputed" in result.metrics))
        return result

    def _work(self, data: Sequence[Datum], objective: Objective, recompute: bool) -> Work:
        """Each rollout once, its head once for each teacher that is read by itself."""
        heads: dict[int, int] = {}
        rollouts = {id(datum.rollout): datum.rollout for datum in data if datum.rollout.loss_mask.any()}
        for datum in data:
            pool = datum.signal.pool
            apart = len(pool.members) if pool is not None and pool.kind == "sum" else 1
            heads[id(datum.rollout)] = heads.get(id(datum.rollout), 0) + apart
        read = read_once([(rollout.prompt_tokens, len(rollout.tokens)) for rollout in rollouts.values()])
        learned = {key: int(rollout.loss_mask.sum()) for key, rollout in rollouts.items()}
        products = sum(heads[key] * count for key, count in learned.items())
        flops = 0
        if self._shape is not None and self._learning is not None:
            flops = self._learning.update(self._shape, read, products, recompute=recompute)
            if objective.needs_sequences:
                flops += self._shape.hidden(read.tokens, read.contexts) + self._shape.logits(products)
        return Work(sum(learned.values()), read.prompt_tokens, flops)

    def optim_step(self, params: AdamParams) -> Metrics:
        """One step of the optimizer, which is not counted."""
        return self._trainer.optim_step(params)

    def sampling_client(self) -> SamplingClient:
        """A client that samples from the current weights."""
        return metered(self._trainer.sampling_client(), self._meter)

    def snapshot(self) -> SamplingClient:
        """A client that goes on sampling from the weights of now."""
        return metered(self._trainer.snapshot(), self._meter)

    def self_teacher(self, rule: SelfRule) -> SelfTeacher:
        """The student's own weights as a scorer, which its teacher counts."""
        return self._trainer.self_teacher(rule)

    def save_state(self) -> dict[str, dict[str, Tensor]]:
        """Every tensor a resume needs."""
        return self._trainer.save_state()

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore what `save_state` gave."""
        self._trainer.load_state(tensors)

    def refuses(self, objective: Objective) -> str | None:
        """Why the trainer cannot train the objective, or None."""
        return self._trainer.refuses(objective)
