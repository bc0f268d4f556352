"""Clients that count the tokens and FLOPs of their calls; see `practicum.costs`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from practicum.costs import Meter, MeteredHead, ModelDims, TrainableDims, Usage, count_read_tokens
from practicum.costs.segments import find_longest_beginning
from practicum.models.tensors import SavedTensor
from practicum.objective import Objective, Signal
from practicum.ports import (
    AdamParams,
    LoadedScalar,
    MixedRequest,
    SamplingClient,
    ScalarModel,
    TokenRule,
    TrainingClient,
)
from practicum.ports.wrapping import WrappedClient
from practicum.types import (
    Datum,
    ForwardResult,
    HeadLike,
    Metrics,
    Sample,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    TeacherSignal,
)


def wrap_client(client: SamplingClient, meter: Meter) -> "MeteredSampler":
    """Wrap the client in a counting client."""
    return MeteredSampler(client, meter)


class MeteredSampler(WrappedClient):
    """A client that counts the texts it samples and scores."""

    def __init__(
        self, client: SamplingClient, meter: Meter, texts: set[tuple[int, ...]] | None = None
    ) -> None:
        super().__init__(client)
        self._meter = meter
        self._texts = texts

    def remember_texts(self) -> "MeteredSampler":
        """Return a metered client that keeps texts, or itself if the client cannot keep texts."""
        client = self.bare.remember_texts()
        return self if client is self.bare else MeteredSampler(client, self._meter, set())

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """Sample with the client and count its tokens."""
        samples = super().sample(requests, params)
        self.count([request.prompt_tokens for request in requests], samples)
        return samples

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """Score with the client and count its tokens; a returned head counts its own products."""
        results = super().score(requests, signal)
        if not requests:
            return results
        texts = [(request.prompt_tokens, len(request.tokens)) for request in requests]
        self._meter.count_scored(texts, heads=any(result.hidden is None for result in results))
        name, count = self._meter.name, self._meter.count_head
        bare = {id(result.head): result.head for result in results if result.head is not None}
        heads = {key: MeteredHead(head, name, count) for key, head in bare.items()}
        return [
            result if result.head is None else replace(result, head=heads[id(result.head)])
            for result in results
        ]

    def count(self, prompts: Sequence[tuple[int, ...]], samples: Sequence[Sample]) -> None:
        """Count the sampled tokens after the prompts, and the tokens that were read before them."""
        texts = [
            (prompt, len(sample.tokens)) for prompt, sample in zip(prompts, samples, strict=True)
        ]
        if self._texts is None:
            self._meter.count_sampled(texts)
            return
        # A client that keeps texts has read all tokens of every text except the last.
        lengths = set(map(len, self._texts))
        beginnings = [find_longest_beginning(prompt, self._texts, lengths) for prompt in prompts]
        rows = list(zip(beginnings, texts, strict=True))
        self._meter.count_sampled([text for beginning, text in rows if beginning is None])
        self._meter.count_continued(
            [
                (len(beginning), len(prompt), count)
                for beginning, (prompt, count) in rows
                if beginning is not None
            ]
        )
        self._texts |= {
            (*prompt, *sample.tokens[:-1].tolist())
            for prompt, sample in zip(prompts, samples, strict=True)
        }

    def sample_mixed(
        self,
        requests: Sequence[MixedRequest],
        teacher: SamplingClient,
        rule: TokenRule,
        params: SamplingParams,
    ) -> list[Sample]:
        """Sample with both models and count the tokens of both."""
        samples = super().sample_mixed(requests, teacher, rule, params)
        self.count([request.prompt_tokens for request in requests], samples)
        # The teacher decoded through `open_decode_batch`, which counts nothing.
        if isinstance(teacher, MeteredSampler):
            teacher.count([request.teacher_prompt_tokens for request in requests], samples)
        return samples


class MeteredScalar(ScalarModel):
    """A `practicum.ports.ScalarModel` that counts the tokens and FLOPs of its calls."""

    def __init__(self, scalar: LoadedScalar, meter: Meter) -> None:
        self._scalar = scalar
        self._meter = meter

    def predict(self, texts: Sequence[ScoreRequest]) -> list[Float[Tensor, " _"]]:
        """Predict with the model and count its tokens."""
        if texts:
            self._meter.count_scored(_measure_texts(texts), heads=False)
        return self._scalar.model.predict(texts)

    def fit(
        self,
        texts: Sequence[ScoreRequest],
        slopes: Sequence[Float[Tensor, " _"]],
        params: AdamParams,
    ) -> Metrics:
        """Take a step of the model and count its FLOPs; the tokens of updates are the student's."""
        read = count_read_tokens(_measure_texts(texts))
        scalar = self._scalar
        # Without a head: one product of the width is negligible compared with the body.
        flops = scalar.trainable_dims.count_update_flops(scalar.dims, read, 0)
        self._meter.ledger.add("update", self._meter.name, Usage(flops=flops))
        return scalar.model.fit(texts, slopes, params)

    def save_state(self) -> Mapping[str, SavedTensor]:
        """Return the model's state."""
        return self._scalar.model.save_state()

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the model's state."""
        self._scalar.model.load_state(tensors)


def _measure_texts(texts: Sequence[ScoreRequest]) -> list[tuple[tuple[int, ...], int]]:
    """Return each text's prompt and the number of tokens after it."""
    return [(text.prompt_tokens, len(text.tokens)) for text in texts]


@runtime_checkable
class HeadView(HeadLike, Protocol):
    """A head that reads the head `bare` with a different mapping of ids."""

    bare: HeadLike

    def take_head(self, bare: HeadLike) -> HeadLike:
        """Return the same view of another head."""
        ...


def _count_into(head: HeadLike, reads: Counter[str]) -> HeadLike:
    """Return a head that counts into `reads`; its metered part may be nested in views."""
    if isinstance(head, MeteredHead):
        name = head.name
        counted = MeteredHead(head.bare, name, lambda tokens: reads.update({name: tokens}))
        return cast(HeadLike, counted)
    if isinstance(head, HeadView):
        return head.take_head(_count_into(head.bare, reads))
    return head


def count_heads(datums: Sequence[Datum], reads: Counter[str]) -> list[Datum]:
    """Return the datums with heads that count into `reads`, for a process without a ledger."""

    def count_scores(signal: TeacherSignal) -> TeacherSignal:
        pool = signal.pool
        head, own_head = (part and _count_into(part, reads) for part in (signal.head, signal.own))
        if pool is not None:
            pool = replace(pool, members=tuple(count_scores(member) for member in pool.members))
        return replace(signal, head=head, own=own_head, pool=pool)

    return [
        replace(datum, signal=count_scores(datum.signal), reference=count_scores(datum.reference))
        for datum in datums
    ]


@dataclass(frozen=True, slots=True)
class MeteredTrainer:
    """A `practicum.ports.TrainingClient` that counts the tokens and FLOPs of each update.

    For a student of unknown dimensions it counts tokens only.
    """

    _trainer: TrainingClient
    _shape: ModelDims | None
    _learning: TrainableDims | None
    _meter: Meter

    def forward_backward(
        self, data: Sequence[Datum], objective: Objective, seed: int
    ) -> ForwardResult:
        """Accumulate the gradient of the objective and count the update."""
        result = self._trainer.forward_backward(data, objective, seed)
        for name, tokens in result.head_reads.items():
            self._meter.ledger.meter(name).count_head(tokens)
        usage = self._compute_usage(data, objective, recompute="recomputed" in result.metrics)
        self._meter.ledger.add("update", self._meter.name, usage)
        return result

    def _compute_usage(
        self, datums: Sequence[Datum], objective: Objective, *, recompute: bool
    ) -> Usage:
        # Several datums may share a rollout, one per teacher: the body then reads it once, and the
        # head is applied for each teacher. A `sum` pool has one product per member, every other
        # signal has one.
        products_per_token: Counter[int] = Counter()
        for datum in datums:
            pool = datum.signal.pool
            products = len(pool.members) if pool is not None and pool.kind == "sum" else 1
            products_per_token[id(datum.rollout)] += products
        rollouts = {
            id(datum.rollout): datum.rollout for datum in datums if datum.rollout.loss_mask.any()
        }
        read = count_read_tokens(
            [(rollout.prompt_tokens, len(rollout.tokens)) for rollout in rollouts.values()]
        )
        supervised = {key: int(rollout.loss_mask.sum()) for key, rollout in rollouts.items()}
        head_rows = sum(products_per_token[key] * count for key, count in supervised.items())
        flops = 0
        if self._shape is not None and self._learning is not None:
            flops = self._learning.count_update_flops(
                self._shape, read, head_rows, recompute=recompute
            )
            if objective.needs_first_pass(datums):
                # Whole-sequence coefficients take one more forward pass, without a gradient.
                flops += self._shape.count_hidden_flops(read.tokens, read.contexts)
                flops += self._shape.count_head_flops(head_rows)
        return Usage(sum(supervised.values()), read.prompt_tokens, flops)

    def optim_step(self, params: AdamParams) -> Metrics:
        """Take one step of the optimizer; it is not counted."""
        return self._trainer.optim_step(params)

    def snapshot(self) -> SamplingClient:
        """Return a counting client that samples from the current weights during training."""
        return wrap_client(self._trainer.snapshot(), self._meter)

    def explain_unsupported(self, objective: Objective) -> str | None:
        """Explain why the trainer cannot train the objective; return None if it can."""
        return self._trainer.explain_unsupported(objective)
