"""Clients that count what is asked of them; see `practicum.costs`."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from practicum.costs import Meter, MeteredHead, ModelDims, TrainableDims, Usage, count_read_tokens
from practicum.objective import Objective, Signal
from practicum.ports import (
    AdamParams,
    Capabilities,
    DecodeBatch,
    LockstepClient,
    MixedRequest,
    SamplingClient,
    TrainingClient,
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


def wrap_client(client: SamplingClient, meter: Meter) -> "MeteredSampler":
    """Wrap the client in one that counts; it decodes in lockstep where the client can."""
    return (
        MeteredLockstep(client, meter)
        if isinstance(client, LockstepClient)
        else MeteredSampler(client, meter)
    )


class MeteredSampler:
    """Counts the texts that are drawn and scored; see `practicum.ports.SamplingClient`."""

    def __init__(self, client: SamplingClient, meter: Meter) -> None:
        self._client = client
        self._meter = meter

    @property
    def capabilities(self) -> Capabilities:
        """Those of the client."""
        return self._client.capabilities

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """What the client draws."""
        samples = self._client.sample(requests, params)
        self.count([request.prompt_tokens for request in requests], samples)
        return samples

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """What the client says; a head that it brings along counts for itself wherever it is applied."""
        answers = self._client.score(requests, signal)
        if not requests:
            return answers
        texts = [(request.prompt_tokens, len(request.tokens)) for request in requests]
        self._meter.scored(texts, heads=any(answer.hidden is None for answer in answers))
        name, count = self._meter.name, self._meter.count_head
        bare = {id(answer.head): answer.head for answer in answers if answer.head is not None}
        heads = {number: MeteredHead(head, name, count) for number, head in bare.items()}
        return [
            answer if answer.head is None else replace(answer, head=heads[id(answer.head)])
            for answer in answers
        ]

    def count(self, prompts: Sequence[tuple[int, ...]], samples: Sequence[Sample]) -> None:
        """Count what was drawn after the prompts."""
        self._meter.count_sampled(
            [(prompt, len(sample.tokens)) for prompt, sample in zip(prompts, samples, strict=True)]
        )


class MeteredLockstep(MeteredSampler):
    """The same over a client that decodes in lockstep with another; what both do is counted."""

    _client: LockstepClient  # type: ignore[assignment]

    def read(self, prompts: Sequence[tuple[int, ...]], rows: int, new_tokens: int) -> DecodeBatch:
        """What the client reads; who draws from it counts."""
        return self._client.read(prompts, rows, new_tokens)

    def sample_mixed(
        self,
        requests: Sequence[MixedRequest],
        teacher: LockstepClient,
        share: float,
        params: SamplingParams,
    ) -> list[Sample]:
        """What the two draw."""
        samples = self._client.sample_mixed(requests, teacher, share, params)
        self.count([request.prompt_tokens for request in requests], samples)
        if isinstance(teacher, MeteredSampler):
            teacher.count([request.teacher_prompt_tokens for request in requests], samples)
        return samples


def count_heads(data: Sequence[Datum], reads: Counter[str]) -> list[Datum]:
    """Return the data with heads that count into `reads`, for a trainer in a process that has no ledger."""

    def count_scores(signal: TeacherSignal) -> TeacherSignal:
        head, pool = signal.head, signal.pool
        if isinstance(head, MeteredHead):
            head = MeteredHead(
                head.bare, head.name, lambda tokens, name=head.name: reads.update({name: tokens})
            )
        if pool is not None:
            pool = replace(pool, members=tuple(count_scores(member) for member in pool.members))
        return replace(signal, head=head, pool=pool)

    return [
        replace(datum, signal=count_scores(datum.signal), reference=count_scores(datum.reference))
        for datum in data
    ]


class MeteredTrainer:
    """Counts what the student learns from; see `practicum.ports.TrainingClient`.

    Of a student whose shape is not known the tokens alone are counted.
    """

    def __init__(
        self,
        trainer: TrainingClient,
        shape: ModelDims | None,
        learning: TrainableDims | None,
        meter: Meter,
    ) -> None:
        self._trainer = trainer
        self._shape = shape
        self._learning = learning
        self._meter = meter

    def forward_backward(
        self, data: Sequence[Datum], objective: Objective, seed: int
    ) -> ForwardResult:
        """The gradient of the objective."""
        result = self._trainer.forward_backward(data, objective, seed)
        for name, tokens in result.head_reads.items():
            self._meter.ledger.meter(name).count_head(tokens)
        self._meter.ledger.add(
            "update", self._meter.name, self._work(data, objective, "recomputed" in result.metrics)
        )
        return result

    def _work(self, data: Sequence[Datum], objective: Objective, recompute: bool) -> Usage:
        """Each rollout once, its head once for each teacher that is read by itself."""
        heads: dict[int, int] = {}
        rollouts = {
            id(datum.rollout): datum.rollout for datum in data if datum.rollout.loss_mask.any()
        }
        for datum in data:
            pool = datum.signal.pool
            apart = len(pool.members) if pool is not None and pool.kind == "sum" else 1
            heads[id(datum.rollout)] = heads.get(id(datum.rollout), 0) + apart
        read = count_read_tokens(
            [(rollout.prompt_tokens, len(rollout.tokens)) for rollout in rollouts.values()]
        )
        learned = {key: int(rollout.loss_mask.sum()) for key, rollout in rollouts.items()}
        products = sum(heads[key] * count for key, count in learned.items())
        flops = 0
        if self._shape is not None and self._learning is not None:
            flops = self._learning.update(self._shape, read, products, recompute=recompute)
            if objective.needs_sequences:
                flops += self._shape.hidden(read.tokens, read.contexts) + self._shape.logits(
                    products
                )
        return Usage(sum(learned.values()), read.prompt_tokens, flops)

    def optim_step(self, params: AdamParams) -> Metrics:
        """One step of the optimizer, which is not counted."""
        return self._trainer.optim_step(params)

    def snapshot(self) -> SamplingClient:
        """A client that goes on sampling from the weights of now."""
        return wrap_client(self._trainer.snapshot(), self._meter)

    def refuses(self, objective: Objective) -> str | None:
        """Why the trainer cannot train the objective, or None."""
        return self._trainer.refuses(objective)
