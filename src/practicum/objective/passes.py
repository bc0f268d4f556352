"""A batch cut into passes through the student: which rollouts go together, and what their teachers said, end to end."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from practicum.costs.segments import how_many_fit
from practicum.objective.tokens import TokenBatch
from practicum.types import Datum, Rollout, ScoreRequest, TeacherSignal, fetch_states


@dataclass(frozen=True, slots=True)
class Part:
    """What one teacher said about the tokens of a pass, end to end; `index` is where the tokens are in the batch."""

    index: Int[Tensor, " T"]
    tokens: TokenBatch
    signal: TeacherSignal
    reference: TeacherSignal

    def release(self, keep: frozenset[tuple[int, ...]]) -> None:
        """Let go of the heads whose keys are not to be kept."""
        for head in (*self.signal.heads, *self.reference.heads):
            if head.key not in keep:
                head.release()


@dataclass(frozen=True, slots=True)
class Pass:
    """Rollouts that go through the student together: for each teacher that speaks about all of them, its rows of the data.

    `read_next` are, for each teacher, the heads that are needed after it.
    """

    data: Sequence[Datum]
    batch: TokenBatch
    rows: list[list[int]]
    read_next: list[frozenset[tuple[int, ...]]]

    @property
    def rollouts(self) -> list[Rollout]:
        """What goes through the student."""
        return [self.data[row].rollout for row in self.rows[0]]

    def parts(self) -> Iterator[Part]:
        """What the teachers said, one at a time, so that no two heads are held that need not be."""
        for rows, keep in zip(self.rows, self.read_next, strict=True):
            part = _gather(self.data, rows, self.batch)
            try:
                yield part
            finally:
                part.release(keep)


def heads_of(data: Sequence[Datum], rows: Sequence[int]) -> frozenset[tuple[int, ...]]:
    """The heads that some rows are read with; all rows of a part share theirs."""
    return frozenset(
        head.key
        for row in rows[:1]
        for head in (*data[row].signal.heads, *data[row].reference.heads)
    )


def one_teacher_each(data: Sequence[Datum]) -> list[Datum]:
    """The data with each sum of teachers taken apart: one datum a teacher, its share as its weight.

    They are then worked through teacher by teacher, so that no two heads are ever held at once.
    """
    apart: list[Datum] = []
    for datum in data:
        pool = datum.signal.pool
        if pool is None or pool.kind != "sum":
            apart.append(datum)
        else:
            shares = zip(pool.members, pool.weights, strict=True)
            apart += [
                replace(datum, signal=member, weight=datum.weight * weight)
                for member, weight in shares
            ]
    return apart


def _gather(data: Sequence[Datum], rows: list[int], batch: TokenBatch) -> Part:
    """The supervised tokens of some rows, with what their teachers said of them."""
    index = torch.cat([(batch.rows == row).nonzero()[:, 0] for row in rows])
    rollouts = [data[row].rollout for row in rows]
    signal = _end_to_end([data[row].signal for row in rows], rollouts)
    reference = _end_to_end([data[row].reference for row in rows], rollouts)
    return Part(index, batch[index], signal, reference)


def _end_to_end(signals: Sequence[TeacherSignal], rollouts: Sequence[Rollout]) -> TeacherSignal:
    """Signals of the same kind as one, at the supervised tokens of their rollouts."""

    def column(tensors: Sequence[Tensor | None]) -> Tensor | None:
        pairs = zip(tensors, rollouts, strict=True)
        kept = [
            tensor[rollout.loss_mask.to(tensor.device)]
            for tensor, rollout in pairs
            if tensor is not None
        ]
        return torch.cat(kept) if kept else None

    pools = [signal.pool for signal in signals if signal.pool is not None]
    members = zip(*(pool.members for pool in pools), strict=True)
    pool = (
        replace(pools[0], members=tuple(_end_to_end(member, rollouts) for member in members))
        if pools
        else None
    )
    return TeacherSignal(
        logprobs=column([signal.logprobs for signal in signals]),
        topk_ids=column([signal.topk_ids for signal in signals]),
        topk_logprobs=column([signal.topk_logprobs for signal in signals]),
        hidden=column(fetch_states(signals)),
        head=signals[0].head,
        name=signals[0].name,
        pool=pool,
    )


def rows_of_passes(
    data: Sequence[Datum], limit: int, packs_up_to: int
) -> Iterator[list[list[int]]]:
    """Rows by pass and, within it, by teacher: at most `limit` tokens a pass, or one rollout.

    Rollouts go together whose teachers answer alike, so that a teacher's head is read for all of its rollouts in a row. Where
    texts cannot be packed, those of like length go together, and padding counts.
    """
    by_rollout: dict[int, list[int]] = {}
    for row, datum in enumerate(data):
        if datum.rollout.loss_mask.any():
            by_rollout.setdefault(id(datum.rollout), []).append(row)
    alike: dict[tuple[object, ...], list[list[int]]] = {}
    for rows in by_rollout.values():
        kind = tuple((_kind(data[row].signal), _kind(data[row].reference)) for row in rows)
        alike.setdefault(kind, []).append(rows)
    packs = longest(data) <= packs_up_to
    for found in alike.values():
        texts = dict(
            zip(
                [rows[0] for rows in found],
                texts_of([data[rows[0]].rollout for rows in found]),
                strict=True,
            )
        )
        waiting = found if packs else sorted(found, key=lambda rows: length_of(data[rows[0]]))
        while waiting:
            count = how_many_fit([texts[rows[0]] for rows in waiting], limit, packs_up_to)
            yield [list(of_teacher) for of_teacher in zip(*waiting[:count], strict=True)]
            waiting = waiting[count:]


def texts_of(rollouts: Sequence[Rollout]) -> list[ScoreRequest]:
    """Return what of each rollout goes through a model."""
    return [
        ScoreRequest(rollout.prompt_tokens, tuple(rollout.tokens.tolist())) for rollout in rollouts
    ]


def _kind(signal: TeacherSignal) -> tuple[object, ...]:
    """What two signals must share to be put end to end: the teacher, its head, the forms, the number of candidates."""
    head = None if signal.head is None else signal.head.key
    candidates = None if signal.topk_ids is None else signal.topk_ids.shape[-1]
    pool = signal.pool
    members = (
        ()
        if pool is None
        else (pool.kind, pool.weights, *(_kind(member) for member in pool.members))
    )
    return signal.name, head, candidates, signal.hidden is None, signal.logprobs is None, members


def length_of(datum: Datum) -> int:
    """Return the tokens of prompt and completion."""
    return len(datum.rollout.prompt_tokens) + len(datum.rollout.tokens)


def count_tokens(data: Sequence[Datum]) -> int:
    """Return the tokens of all texts, prompts and completions."""
    return sum(map(length_of, data))


def longest(data: Sequence[Datum]) -> int:
    """Return the tokens of the longest text, prompt and completion; 0 without any."""
    return max(map(length_of, data), default=0)
