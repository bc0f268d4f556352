"""Collect the report of an update: means over its tokens, and a few numbers at every token."""

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from practicum import functional as F
from practicum.functional import comparison
from practicum.functional.distributions import SMALLEST_TAIL
from practicum.losses.closed_form import LossChunk
from practicum.losses.compile import CompiledObjective
from practicum.losses.passes import Part
from practicum.losses.signal_reader import read_tokens
from practicum.losses.support import share_support
from practicum.losses.token_axis import merge_parts
from practicum.losses.tokens import TermValues, TokenBatch
from practicum.types import Datum, ForwardResult, Metrics, TeacherSignal, TokenRecord

COMPARED_TOKENS, COMPARED_SHARE = 64, 16
"""One token in 16 is compared, or more, so that at least 64 tokens are compared."""

COLUMNS = tuple(field.name for field in fields(TokenRecord))
"""The numbers that are recorded at every token."""


class UpdateStatistics:
    """The report of an update: sums over tokens, and the numbers of `TokenRecord` per token."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        self.tokens = tokens
        # Everything stays on the device until the end: reading a number after each chunk makes the
        # program wait for the device, thousands of times per update.
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        self._losses: dict[str, Tensor] = {}
        self._columns = torch.full((len(COLUMNS), tokens), torch.nan, device=device)
        self._supervised = torch.zeros(tokens, dtype=torch.bool, device=device)
        self._broken = torch.zeros(tokens, dtype=torch.bool, device=device)

    def add(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Add the values of a measure at some tokens, or only at the masked tokens."""
        mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
        total = torch.where(mask, values, 0).double().sum()
        count = mask.sum()
        self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._counts[name] = self._counts[name] + count if name in self._counts else count

    def _compute_means(self) -> Metrics:
        """Return the mean of each measure over the tokens at which it is known.

        With several teachers, add the share of each in the loss.
        """
        sums, counts, losses = map(_read, (self._sums, self._counts, self._losses))
        total = sum(losses.values())
        shares = losses if len(losses) > 1 and total > 0 else {}
        means = {name: sums[name] / count for name, count in counts.items() if count}
        return means | {f"teacher_share/{name}": value / total for name, value in shares.items()}

    def add_loss_share(
        self, teacher: str, values: Sequence[TermValues], coefficients: Sequence[Tensor]
    ) -> None:
        """Add the absolute loss of some tokens to the total of their teacher, if it has a name.

        The loss of a sampled token is its coefficient.
        """
        if not teacher:
            return
        for coefficient, term_values in zip(coefficients, values, strict=True):
            divergence = term_values.divergence
            loss = coefficient if divergence is None else coefficient * divergence
            total = loss.double().abs().nansum()
            self._losses[teacher] = (
                self._losses[teacher] + total if teacher in self._losses else total
            )

    def record_tokens(
        self, index: Tensor, values: TermValues, coefficients: Sequence[Tensor]
    ) -> None:
        """Record the numbers of some tokens by their `index` in the batch."""
        columns = {
            "logprobs": values.logprobs,
            "teacher_logprobs": values.teacher_logprobs,
            "divergence": values.divergence,
            "student_entropy": values.student_entropy,
            "teacher_entropy": values.teacher_entropy,
            "weight": sum(coefficients[1:], coefficients[0]),
            "reverse_kl": values.reverse_kl,
        }
        for row, name in enumerate(COLUMNS):
            if (column := columns[name]) is not None:
                self._columns[row, index] = column.to(self._columns)
        self._supervised[index] = torch.stack(list(coefficients)).ne(0).any(dim=0)

    def record_coefficients(
        self,
        index: Tensor,
        teacher: str,
        values: Sequence[TermValues],
        coefficients: Sequence[Tensor],
    ) -> None:
        """Record the loss contributions of some tokens, once their coefficients are known."""
        self.record_broken(index, values, coefficients)
        self.record_tokens(index, values[0], coefficients)
        self.add_loss_share(teacher, values, coefficients)

    def record_broken(
        self, index: Tensor, values: Sequence[TermValues], coefficients: Sequence[Tensor]
    ) -> None:
        """Record the tokens at which the loss is not finite."""
        pairs = zip(coefficients, values, strict=True)
        losses = [factor * term_values.loss_value for factor, term_values in pairs]
        self._broken[index] |= ~torch.stack(losses).isfinite().all(dim=0)

    def merge(self, parts: "Sequence[UpdateStatistics]") -> None:
        """Replace the statistics by merged `parts`, each of a process with some of the tokens."""
        if len(parts) == 1:
            return
        # In the order of the processes, not of arrival: sums of floats depend on it.
        totals = [(part._sums, part._counts, part._losses) for part in parts]
        self._sums, self._counts, self._losses = map(_add_up, zip(*totals, strict=True))
        for part in parts:
            columns = part._columns.to(self._columns.device)
            self._columns = torch.where(columns.isnan(), self._columns, columns)
            self._supervised |= part._supervised.to(self._supervised.device)
            self._broken |= part._broken.to(self._broken.device)

    @property
    def is_broken(self) -> bool:
        """Return True if the loss of any token is not finite."""
        return bool(self._broken.any())

    @property
    def has_no_supervision(self) -> bool:
        """Return True if every token has coefficient 0, so that there is nothing to train on."""
        return not self._supervised.any()

    def build_result(
        self, teacher_data: Sequence[Datum], rollout_data: Sequence[Datum]
    ) -> ForwardResult:
        """Return the report of the update by rollout; numbers are NaN at tokens without a loss.

        `teacher_data` are the `rollout_data` with each sum of teachers split into one datum per
        teacher. The numbers of the first teacher are reported. A rollout counts the supervised
        tokens of the teacher that supervises most of them. If a loss was not finite, no token is
        supervised.
        """
        outputs: dict[int, Tensor] = {}
        supervised: dict[int, int] = {}
        broken_rows = 0
        token_columns, is_supervised, is_broken = (
            column.cpu() for column in (self._columns, self._supervised, self._broken)
        )
        fails = bool(is_broken.any())
        start = 0
        for datum in teacher_data:
            mask, key = datum.rollout.loss_mask, id(datum.rollout)
            numbers = torch.full((len(COLUMNS), len(mask)), torch.nan)
            end = start + int(mask.sum())
            numbers[:, mask] = token_columns[:, start:end]
            outputs.setdefault(key, numbers)
            count = 0 if fails else int(is_supervised[start:end].sum())
            broken_rows += bool(is_broken[start:end].any())
            supervised[key] = max(supervised.get(key, 0), count)
            start = end
        counts = [supervised[id(datum.rollout)] for datum in rollout_data]
        num_tokens = sum(int(datum.rollout.loss_mask.sum()) for datum in rollout_data)
        metrics = {"tokens": float(num_tokens)}
        if fails:
            metrics["nonfinite"] = float(broken_rows)
        else:
            metrics |= {"supervised": float(sum(counts)), **self._compute_means()}
        columns = torch.cat([outputs[id(datum.rollout)] for datum in rollout_data], dim=1)
        return ForwardResult(metrics, TokenRecord(*columns), counts)


@torch.no_grad()
def compare(records: UpdateStatistics, chunk: LossChunk, part: Part, piece: slice) -> None:
    """Record the overlap of student and teacher at some tokens, and the teachers' conflict."""
    # Positions in the batch decide, so the choice does not depend on micro-batches and chunks.
    stride = max(min(records.tokens // COMPARED_TOKENS, COMPARED_SHARE), 1)
    positions = (part.index[piece] % stride == 0).nonzero()[:, 0]
    pair = chunk.get_distributions(positions)
    if pair is None or not len(positions):
        return
    tokens = part.tokens.tokens[piece][positions]
    if _has_outside(part.signal):
        # The last entry of each distribution is the mass on the tokens that only this model has.
        for name, logprobs in zip(("student", "teacher"), pair, strict=True):
            mass = logprobs[:, -1].exp()
            is_floor = mass < 1.01 * SMALLEST_TAIL
            records.add(f"{name}_mass_outside", mass.masked_fill(is_floor, 0.0))
    shared = comparison.compare([(*pair, tokens)], ("overlap", "student_mass")).known()
    records.add("overlap", shared["overlap"])
    records.add("overlap_mass", shared["student_mass"])
    if part.signal.pool is None:
        return
    indices = positions + piece.start
    distributions = share_support(
        [read_tokens(member, indices) for member in part.signal.pool.members]
    )
    members = [part.full for part in distributions if part.full is not None]
    if len(members) > 1:
        records.add("conflict_cosine", F.conflict_cosine(pair[0], members))
        records.add("disagreement", F.disagreement(members))
        records.add("top1_conflict", F.top1_conflict(members))


def measure_dropped(
    records: UpdateStatistics,
    objective: CompiledObjective,
    values: Sequence[TermValues],
    batch: TokenBatch,
) -> None:
    """Record the share of tokens that a term's correction drops, such as PPO's clip."""
    for number, side in enumerate(objective.tokens):
        if side.correction.entry.drops:
            dropped, trained = side.find_dropped(values[number], batch)
            name = objective.name_metric("clipped", number)
            records.add(name, dropped.to(batch.aggregate), trained)


@torch.no_grad()
def measure_batch(
    records: UpdateStatistics,
    objective: CompiledObjective,
    values_by_part: Sequence[Sequence[TermValues]],
    indices: Sequence[Tensor],
    batch: TokenBatch,
) -> None:
    """Record the measures that need the whole batch, from the values of its parts at `indices`.

    The measures are the share of clipped tokens and, for terms of pairs, the mean loss, the share
    of pairs in which the chosen completion is ahead, and the share of completions in no pair.
    """
    values = merge_parts(values_by_part, indices)
    measure_dropped(records, objective, values, batch)
    for number, side in enumerate(objective.tokens):
        if side.pairs is None:
            continue
        losses, is_ahead, unpaired = side.pairs.compare_pairs(values[number], batch)
        records.add(objective.name_metric("loss", number), losses)
        records.add(objective.name_metric("pairs_in_order", number), is_ahead)
        records.add(objective.name_metric("unpaired", number), unpaired.to(losses))


def _add_up(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the sum of each number over the parts that have it."""
    totals: dict[str, Tensor] = {}
    for part in parts:
        for name, number in part.items():
            totals[name] = (
                totals[name] + number.to(totals[name].device) if name in totals else number
            )
    return totals


def _read(numbers: dict[str, Tensor]) -> dict[str, float]:
    """Copy the numbers from their device, in one transfer."""
    values = torch.stack(list(numbers.values())).tolist() if numbers else []
    return dict(zip(numbers, values, strict=True))


def _has_distribution(signal: TeacherSignal) -> bool:
    """Return True if the whole distribution of the teacher, or of each of several, is known."""
    members = (signal,) if signal.pool is None else signal.pool.members
    return all(member.hidden is not None for member in members)


def _has_outside(signal: TeacherSignal) -> bool:
    """Return True if the teacher, or one of several, has a different vocabulary than the student."""
    members = (signal,) if signal.pool is None else signal.pool.members
    return any(member.outside is not None for member in members)


def measure(
    records: UpdateStatistics,
    values: Sequence[TermValues],
    tokens: TokenBatch,
    signal: TeacherSignal,
    objective: CompiledObjective,
) -> None:
    """Record the measures that every step reports, except the loss of pairs.

    The measures are the values of the terms, the divergence to the teacher, the entropies, the
    sampler mismatch, and the share of tokens that the teacher does not have. `reverse_kl_estimated`
    is 1 if the divergence is the mean log-ratio of sampled tokens somewhere, and absent if it is
    exact.
    """
    first, teacher = values[0], signal.name
    unknown = signal.unknown_tokens
    if unknown is not None:
        unknown = unknown.to(first.logprobs.device)
        records.add("tokens_outside", unknown)
    for number, term_values in enumerate(values):
        if objective.tokens[number].pairs is not None:
            continue
        loss = term_values.divergence
        if loss is None and term_values.teacher_logprobs is not None:
            loss = F.k1(term_values.logprobs, term_values.teacher_logprobs)
        loss = -term_values.logprobs if loss is None else loss
        records.add(objective.name_metric("loss", number), loss, term_values.is_scored)
    if first.reverse_kl is not None:
        is_known = None if unknown is None else ~unknown
        records.add("reverse_kl", first.reverse_kl, is_known)
        if not _has_distribution(signal):
            records.add("reverse_kl_estimated", torch.ones_like(first.reverse_kl), is_known)
        if teacher:
            records.add(f"reverse_kl/{teacher}", first.reverse_kl, is_known)
    if first.reference_logprobs is not None and first.teacher_logprobs is not None:
        gap = first.teacher_logprobs - first.reference_logprobs
        records.add("context_gap", gap, ~gap.isnan())
    records.add("student_entropy", first.student_entropy)
    if first.teacher_entropy is not None:
        records.add("teacher_entropy", first.teacher_entropy)
    mismatch = (first.logprobs - tokens.policy_logprobs).abs()
    records.add("sampler_mismatch", mismatch, ~mismatch.isnan())
