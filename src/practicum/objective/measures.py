"""What an update reports: means over its tokens, and a few numbers at every token."""

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from practicum import functional as F
from practicum.functional import comparison
from practicum.objective.closed_form import LossChunk
from practicum.objective.passes import Part
from practicum.objective.reading import read_tokens
from practicum.objective.tokens import TermValues, TokenBatch
from practicum.types import Datum, ForwardResult, Metrics, TokenRecord

COMPARED_TOKENS, COMPARED_SHARE = 64, 16
"""Whole distributions are compared for the record at one token in 16, more often where that leaves fewer than 64."""

COLUMNS = tuple(field.name for field in fields(TokenRecord))
"""What is kept of every token."""


class Records:
    """What a step reports: sums over tokens, and the numbers of `TokenRecord` at every token of the whole batch."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._losses: dict[str, float] = {}
        self.broken: list[int] = []
        self._columns = torch.full((len(COLUMNS), tokens), torch.nan)
        self._supervised = torch.zeros(tokens, dtype=torch.bool)

    def add(self, name: str, values: Tensor) -> None:
        """Count some tokens' values of a measure."""
        self._sums[name] = self._sums.get(name, 0.0) + values.double().sum().item()
        self._counts[name] = self._counts.get(name, 0) + len(values)

    def means(self) -> Metrics:
        """The mean of each measure over the tokens at which it is known, and what each of several teachers' loss is of all."""
        total = sum(self._losses.values())
        shares = self._losses if len(self._losses) > 1 and total > 0 else {}
        means = {
            name: value / self._counts[name]
            for name, value in self._sums.items()
            if self._counts[name]
        }
        return means | {f"teacher_share/{name}": value / total for name, value in shares.items()}

    def share(self, teacher: str, values: Sequence[TermValues], shares: Sequence[Tensor]) -> None:
        """Count some tokens' part of the loss under the teacher that was named; a sampled token's is its coefficient."""
        if teacher:
            sizes = [
                (share if value.divergence is None else share * value.divergence)
                .double()
                .abs()
                .nansum()
                .item()
                for share, value in zip(shares, values, strict=True)
            ]
            self._losses[teacher] = self._losses.get(teacher, 0.0) + sum(sizes)

    def place(self, index: Tensor, values: TermValues, shares: Sequence[Tensor]) -> None:
        """Keep the numbers of some tokens, by their places in the batch; `shares` are the terms' coefficients."""
        known = {
            "logprobs": values.logprobs,
            "teacher_logprobs": values.teacher_logprobs,
            "divergence": values.divergence,
            "student_entropy": values.student_entropy,
            "teacher_entropy": values.teacher_entropy,
            "weight": sum(shares[1:], shares[0]),
            "reverse_kl": values.reverse_kl,
        }
        for row, name in enumerate(COLUMNS):
            if (column := known[name]) is not None:
                self._columns[row, index] = column
        self._supervised[index] = torch.stack([share != 0 for share in shares]).any(dim=0)

    @property
    def nothing_supervised(self) -> bool:
        """Whether no token has a coefficient other than 0, so that there is nothing to learn."""
        return not self._supervised.any()

    def result(self, data: Sequence[Datum], whole: Sequence[Datum]) -> ForwardResult:
        """Return what the step reports, by rollout of `whole`; numbers are NaN at tokens that were not learned from.

        `data` are those of `whole` with each sum of teachers taken apart; the numbers of its first teacher stand for all, and a
        token is supervised by the teacher that supervises the most tokens of its rollout. Where a loss was not finite no
        token is supervised.
        """
        outputs: dict[int, Tensor] = {}
        supervised: dict[int, int] = {}
        start = 0
        for datum in data:
            mask, key = datum.rollout.loss_mask, id(datum.rollout)
            numbers = torch.full((len(COLUMNS), len(mask)), torch.nan)
            end = start + int(mask.sum())
            numbers[:, mask] = self._columns[:, start:end]
            outputs.setdefault(key, numbers)
            count = 0 if self.broken else int(self._supervised[start:end].sum())
            supervised[key] = max(supervised.get(key, 0), count)
            start = end
        counts = [supervised[id(datum.rollout)] for datum in whole]
        metrics = {"tokens": float(sum(int(datum.rollout.loss_mask.sum()) for datum in whole))}
        if self.broken:
            metrics["nonfinite"] = float(len(set(self.broken)))
        else:
            metrics |= {"supervised": float(sum(counts)), **self.means()}
        columns = torch.cat([outputs[id(datum.rollout)] for datum in whole], dim=1)
        return ForwardResult(metrics, TokenRecord(*columns), counts)


@torch.no_grad()
def compare(records: Records, side: LossChunk, part: Part, piece: slice) -> None:
    """How much student and teacher overlap, and how much several teachers contradict each other, at some of the tokens."""
    stride = max(min(records.tokens // COMPARED_TOKENS, COMPARED_SHARE), 1)
    some = (part.index[piece] % stride == 0).nonzero()[:, 0]
    pair = side.distributions(some)
    if pair is None or not len(some):
        return
    tokens = part.tokens.tokens[piece][some]
    shared = comparison.compare([(*pair, tokens)], ("overlap", "student_mass")).known()
    records.add("overlap", shared["overlap"])
    records.add("overlap_mass", shared["student_mass"])
    if part.signal.pool is None:
        return
    read = [read_tokens(member, some + piece.start).full for member in part.signal.pool.members]
    members = [full for full in read if full is not None]
    if len(members) > 1:
        records.add("conflict_cosine", F.conflict_cosine(pair[0], members))
        records.add("disagreement", F.disagreement(members))
        records.add("top1_conflict", F.top1_conflict(members))


def measure(
    records: Records, values: Sequence[TermValues], tokens: TokenBatch, teacher: str
) -> None:
    """Add what every step reports: the terms' values, the divergence to the teacher, entropies, sampler mismatch."""
    first = values[0]
    for number, value in enumerate(values):
        name = "loss" if len(values) == 1 else f"loss_{number}"
        measure = value.divergence
        if measure is None and value.teacher_logprobs is not None:
            measure = F.k1(value.logprobs, value.teacher_logprobs)
        if measure is None and value.teacher_logprobs is None:
            measure = -value.logprobs
        if measure is not None and bool(value.answered.all()):
            records.add(name, measure)
    if first.reverse_kl is not None:
        records.add("reverse_kl", first.reverse_kl)
        if teacher:
            records.add(f"reverse_kl/{teacher}", first.reverse_kl)
    records.add("student_entropy", first.student_entropy)
    if first.teacher_entropy is not None:
        records.add("teacher_entropy", first.teacher_entropy)
    mismatch = (first.logprobs - tokens.policy_logprobs).abs()
    records.add("sampler_mismatch", mismatch[~mismatch.isnan()])
