"""Split a batch into passes through the student and pack the signals for each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum.costs.segments import split_by_tokens
from practicum.losses.tokens import TermValues, TokenBatch
from practicum.losses.vocabulary_axis import LogitSide
from practicum.objective.signal_call import ANSWERS
from practicum.objective.spec import Objective
from practicum.types import Datum, Rollout, ScoreRequest, TeacherSignal


@dataclass(frozen=True, slots=True)
class Part:
    """The signals of one teacher at the supervised tokens of a pass, packed.

    `index` has the positions of these tokens in the batch, on the CPU.
    """

    index: Int[Tensor, " T"]
    tokens: TokenBatch
    signal: TeacherSignal
    reference: TeacherSignal

    def __getitem__(self, positions: Int[Tensor, " t"]) -> "Part":
        """Return the part at some of its tokens."""
        return Part(
            index=self.index[positions],
            tokens=self.tokens[positions],
            signal=self.signal[positions],
            reference=self.reference[positions],
        )

    def release(self, keep: frozenset[tuple[int, ...]]) -> None:
        """Release every head with a key that is not in `keep`."""
        for head in (*self.signal.heads, *self.reference.heads):
            if head.key not in keep:
                head.release()


@dataclass(frozen=True, slots=True)
class Pass:
    """Rollouts that go through the student together.

    `views` has the data and the batch of each view, which is about some of the supervised tokens.
    `rows` has, for each teacher that scores all of them, its rows in the data; `read_next` has,
    for each view of each teacher, the keys of the heads that are needed after it.
    """

    data: Sequence[Datum]
    views: Sequence[tuple[Sequence[Datum], TokenBatch]]
    rows: list[list[int]]
    read_next: list[frozenset[tuple[int, ...]]]

    @property
    def rollouts(self) -> list[Rollout]:
        """Return the rollouts that go through the student."""
        return [self.data[row].rollout for row in self.rows[0]]

    def gather_parts(self) -> Iterator[tuple[int, slice | Tensor, Part]]:
        """Yield the signals teacher by teacher, so that no head is in memory longer than needed.

        Each comes with the number of its view and its places among the pass's supervised tokens.
        """
        supervised = torch.cat([rollout.loss_mask for rollout in self.rollouts])
        units = [(rows, number) for rows in self.rows for number in range(len(self.views))]
        for (rows, number), keep in zip(units, self.read_next, strict=True):
            datums, batch = self.views[number]
            mask = torch.cat([datums[row].rollout.loss_mask for row in rows])[supervised]
            part = _gather(datums, rows, batch)
            # Released even if the consumer fails: a retry with smaller passes needs the memory.
            try:
                yield number, slice(None) if mask.all() else mask.nonzero()[:, 0], part
            finally:
                part.release(keep)


def add_answers(
    part: Part, sides: Sequence[LogitSide], values: Sequence[Sequence[TermValues]]
) -> Part:
    """Add the column `ANSWERS` to the signals of the terms that read it.

    `values` are the values of each term for consecutive pieces of the part.
    """
    for number, side in enumerate(sides):
        term = TermValues.join([piece[number] for piece in values])
        if side.signal.reads_answers and term.teacher_logprobs is not None:
            answers = average_answers(term.logprobs, term.teacher_logprobs, part.tokens.rows)
            name = "reference" if side.asks_reference else "signal"
            signal = part.reference if side.asks_reference else part.signal
            signal = replace(signal, extras={**signal.extras, ANSWERS: answers})
            part = replace(part, **{name: signal})
    return part


def average_answers(
    student: Float[Tensor, " T"], teacher: Float[Tensor, " T"], rows: Int[Tensor, " T"]
) -> Float[Tensor, "T 2"]:
    """Return the geometric mean of the probabilities of each row's tokens, at its tokens.

    The columns are the student and the teacher. Tokens that the teacher lacks (NaN) do not count.
    """
    pair = torch.stack([student, teacher], dim=-1)
    counts = (~pair.isnan().any(dim=-1, keepdim=True)).to(pair)
    sums = pair.new_zeros(int(rows.max()) + 1 if len(rows) else 0, 3)
    sums.index_add_(0, rows, torch.cat([torch.where(counts > 0, pair, 0.0), counts], dim=-1))
    return (sums[:, :2] / sums[:, 2:].clamp(min=1.0)).exp()[rows]


def collect_head_keys(datums: Sequence[Datum], rows: Sequence[int]) -> frozenset[tuple[int, ...]]:
    """Return the keys of the heads that some rows need; all rows of a part share their heads."""
    return frozenset(
        head.key
        for row in rows[:1]
        for head in (*datums[row].signal.heads, *datums[row].reference.heads)
    )


def split_views(
    datums: Sequence[Datum], objective: Objective
) -> list[tuple[Sequence[Datum], Objective]]:
    """Return the terms about a model's tokens and about an environment's, with a loss only there."""

    def select(datum: Datum, observes: bool) -> Datum:
        mask = datum.rollout.loss_mask & (datum.rollout.mark_tokens_by("environment") == observes)
        return replace(datum, rollout=replace(datum.rollout, loss_mask=mask))

    views = objective.split_by(lambda term: term.observes)
    if len(views) == 1:
        return [(datums, objective)]
    return [([select(datum, key) for datum in datums], part) for key, part in views.items()]


def split_pools(datums: Sequence[Datum]) -> list[Datum]:
    """Return the data with each sum of teachers split: one datum per teacher, weighted by its
    share.

    The teachers are then processed one by one, so that two heads are never in memory at once.
    """
    split: list[Datum] = []
    for datum in datums:
        pool = datum.signal.pool
        if pool is None or pool.kind != "sum":
            split.append(datum)
            continue
        for member, weight in zip(pool.members, pool.weights, strict=True):
            split.append(replace(datum, signal=member, weight=datum.weight * weight))
    return split


def _gather(datums: Sequence[Datum], rows: list[int], batch: TokenBatch) -> Part:
    """Return the supervised tokens of some rows with the signals about them."""
    index = find_tokens(batch.rows, rows)
    rollouts = [datums[row].rollout for row in rows]
    signal = pack_signals([datums[row].signal for row in rows], rollouts)
    reference = pack_signals([datums[row].reference for row in rows], rollouts)
    return Part(index, batch[index], signal, reference)


def find_tokens(token_rows: Int[Tensor, " T"], rows: Sequence[int]) -> Int[Tensor, " t"]:
    """Return the indices of some rows' tokens, row by row; `token_rows` has each token's row."""
    # A row's tokens are consecutive, so each row is found by two searches instead of a scan of all
    # tokens.
    sought = torch.tensor(rows, device=token_rows.device)
    first = torch.searchsorted(token_rows, sought).tolist()
    last = torch.searchsorted(token_rows, sought, right=True).tolist()
    return torch.cat([torch.arange(*place) for place in zip(first, last, strict=True)])


def pack_signals(signals: Sequence[TeacherSignal], rollouts: Sequence[Rollout]) -> TeacherSignal:
    """Pack signals of the same kind into one, at the supervised tokens of their rollouts."""

    def select(signal: TeacherSignal, mask: Tensor) -> TeacherSignal:
        # By index: with a mask, the program would wait until the device has counted it.
        return signal.fetch() if mask.all() else signal[mask.nonzero()[:, 0]]

    pairs = zip(signals, rollouts, strict=True)
    supervised = [select(signal, rollout.loss_mask) for signal, rollout in pairs]
    # The spans are numbered in the batch.
    return TeacherSignal.join([replace(signal, span_starts=None) for signal in supervised])


def group_rows_into_passes(
    datums: Sequence[Datum], limit: int, packs_up_to: int
) -> Iterator[list[list[int]]]:
    """Yield rows by pass and, within a pass, by teacher.

    A pass has at most `limit` tokens, or one rollout. Rollouts with the same kinds of signals go
    together, so that a head reads all of its rollouts in a row. If texts cannot be packed, texts
    of similar length go together, and padding counts as tokens.
    """
    by_rollout: dict[int, list[int]] = {}
    for row, datum in enumerate(datums):
        if datum.rollout.loss_mask.any():
            by_rollout.setdefault(id(datum.rollout), []).append(row)
    alike: dict[tuple[object, ...], list[list[int]]] = {}
    for rows in by_rollout.values():
        signals = (signal for row in rows for signal in (datums[row].signal, datums[row].reference))
        alike.setdefault(tuple(map(_read_kind, signals)), []).append(rows)
    packs = find_longest_length(datums) <= packs_up_to
    for group in alike.values():
        if not packs:
            # A padded batch costs its longest text times its rows.
            group.sort(key=lambda rows: count_text_tokens(datums[rows[0]]))
        requests = build_score_requests([datums[rows[0]].rollout for rows in group])
        for part in split_by_tokens(requests, limit, packs_up_to):
            yield [list(rows) for rows in zip(*group[part], strict=True)]


def build_score_requests(rollouts: Sequence[Rollout], *, reuse: bool = False) -> list[ScoreRequest]:
    """Return the text of each rollout as a request to a model.

    With `reuse`, the student that wrote them can reuse the states that it kept.
    """
    return [
        ScoreRequest(
            rollout.prompt_tokens,
            tuple(rollout.tokens.tolist()),
            states=rollout.states if reuse else None,
        )
        for rollout in rollouts
    ]


def _read_kind(signal: TeacherSignal) -> tuple[object, ...]:
    """Return the key that signals must share to be packed.

    It consists of the teacher, its head, the forms of the signal and the number of candidates.
    """
    head = None if signal.head is None else signal.head.key
    candidates = None if signal.topk_ids is None else signal.topk_ids.shape[-1]
    members: tuple[object, ...] = ()
    if (pool := signal.pool) is not None:
        members = (pool.kind, pool.weights, *map(_read_kind, pool.members))
    answers = (signal.hidden, signal.logprobs, signal.outside, signal.unknown)
    forms = tuple(answer is None for answer in answers)
    return signal.name, head, candidates, forms, members, tuple(signal.extras)


def count_text_tokens(datum: Datum) -> int:
    """Return the number of tokens of prompt and completion."""
    return len(datum.rollout.prompt_tokens) + len(datum.rollout.tokens)


def count_tokens(datums: Sequence[Datum]) -> int:
    """Return the number of tokens of all texts, prompts and completions."""
    return sum(map(count_text_tokens, datums))


def find_longest_length(datums: Sequence[Datum]) -> int:
    """Return the number of tokens of the longest text, prompt and completion; 0 without any."""
    return max(map(count_text_tokens, datums), default=0)
