"""Compare the probabilities of two vocabularies by rank, as ULD and GOLD do."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from practicum.errors import TeacherError
from practicum.functional.sequence import add_later, gather_logprobs
from practicum.functional.sorting import sorted_l1
from practicum.objective.distribution import SignalComparison
from practicum.objective.estimator_call import EstimatorCall
from practicum.objective.signal_call import Full, SignalCall
from practicum.objective.translated_answer import TranslatedAnswer
from practicum.types import TeacherSignal

MERGED = "merged"
"""The column with two numbers at the first token of each span, and 0 elsewhere.

The first number is the count of the student's tokens. The second is the teacher's log-probability of
its later tokens in the span.
"""

ROWS = 64
"""The number of positions with logits in memory at once."""


class ByIndex(Full):
    """The full distributions of two tokenizations, paired by the index of the token."""

    reads_more: ClassVar[bool] = True

    def add_more(self, signal: TeacherSignal, answer: TranslatedAnswer) -> TeacherSignal:
        """Place the teacher's rows at the student's tokens with the same index."""
        states, unknown = answer.signal.states, signal.unknown
        assert states is not None and unknown is not None
        count = min(len(unknown), len(answer.tokens))
        return answer.place_states(signal, range(count), states[:count])


class BySpan(Full):
    """The full distribution at the first token of each span of text that two tokenizations share."""

    reads_more: ClassVar[bool] = True

    def add_more(self, signal: TeacherSignal, answer: TranslatedAnswer) -> TeacherSignal:
        """Place the teacher's first row of each span, and add the column `MERGED`."""
        states, unknown = answer.signal.states, signal.unknown
        assert states is not None and unknown is not None
        logprobs = _read_later_logprobs(answer, states)
        merged = torch.zeros(len(unknown), 2)
        for student, teacher in answer.spans:
            size = student.stop - student.start
            merged[student.start] = torch.tensor([size, logprobs[teacher].sum()])
        starts = [student.start for student, _ in answer.spans]
        rows = [teacher.start for _, teacher in answer.spans]
        placed = answer.place_states(signal, starts, states[rows])
        return replace(placed, extras={**placed.extras, MERGED: merged})


@torch.no_grad()
def _read_later_logprobs(answer: TranslatedAnswer, states: Tensor) -> Tensor:
    """Return the log-probability of each of the teacher's tokens after the first of a span, else 0."""
    head, logprobs = answer.signal.head, torch.zeros(len(answer.tokens))
    assert head is not None, "a whole distribution has a head"
    later = [place for _, part in answer.spans for place in range(part.start + 1, part.stop)]
    # Process a few rows at a time: the logits of a complete answer would need much memory.
    for rows in torch.tensor(later, dtype=torch.long).split(ROWS):
        row_logprobs = head.logprobs(states[rows.to(states.device)]).cpu()
        logprobs[rows] = row_logprobs.gather(-1, answer.tokens[rows, None])[:, 0].float()
    return logprobs


class Config(SignalCall):
    """The L1 distance of sorted probabilities, independent of their tokens (ULD 2402.12030).

    With `matched` the tokens that both vocabularies have are compared by the divergence, weighted by
    their share of the teacher's vocabulary, and the remaining tokens are sorted (GOLD). `align`
    pairs the positions of two tokenizations: each span of text, whose first distribution is multiplied
    by the probability of the later tokens of the span (GOLD), or each token index (ULD).
    """

    type: Literal["sorted"] = "sorted"
    matched: bool = False
    align: Literal["span", "index"] = "span"
    measures: ClassVar[bool] = True
    compares: ClassVar[bool] = True
    unshared: ClassVar[bool] = True

    @property
    def question(self) -> Full:
        """Return the full distribution, by span or by index."""
        return BySpan() if self.align == "span" else ByIndex()

    def read_groups(self, extras: Mapping[str, Tensor]) -> Int[Tensor, " T"] | None:
        """Return the lengths of the spans; the probability of a span is a product over its tokens."""
        return extras[MERGED][:, 0].long() if MERGED in extras else None

    def explain_conflict(self, gradient: EstimatorCall, divergence: str, plain: bool) -> str | None:
        """Refuse every estimator except the derivative, and a divergence that would be ignored."""
        if not gradient.pathwise or not plain:
            return (
                "signal 'sorted' differentiates a distance to the teacher itself; leave out target "
                "and estimator"
            )
        if not self.matched and divergence != "reverse_kl":
            return (
                "signal 'sorted' has a fixed distance; leave out divergence, or set "
                "sorted(matched=true) to compare the matched tokens by the divergence"
            )
        return None

    def explain_extras(self, *, has_reward: bool, clip: str, source: str) -> str | None:
        """Refuse a clip of tokens."""
        if clip == "entries":
            return "clip 'entries' needs tokens, and sorted probabilities have none; set clip: loss"
        return None

    def compare(self, comparison: SignalComparison) -> Tensor:
        """Return the distance of sorted probabilities."""
        return compare_by_rank(comparison, matched=self.matched)


def compare_by_rank(comparison: SignalComparison, *, matched: bool) -> Tensor:
    """Return the distance of sorted probabilities at each position, differentiable in the student.

    With `matched` it is the divergence of the tokens that both vocabularies have, times their share
    of the teacher's vocabulary, plus the distance of all remaining tokens times the remaining share
    (GOLD). The probabilities of a span of several tokens do not add up to 1. Raises TeacherError for
    a teacher that only reports the sum of its other tokens.
    """
    student, teacher = comparison.student, comparison.teacher
    full, unshared = teacher.full, teacher.own
    assert full is not None, "the signal asks for whole distributions"
    if teacher.outside is None:
        return _sum_matched(comparison, student, full) if matched else sorted_l1(student, full)
    if unshared is None:
        raise TeacherError(
            f"signal 'sorted' reads every token of the {comparison.against}, and several teachers of "
            "other vocabularies only give their common tokens; set signal: full, or use one teacher"
        )
    if MERGED in teacher.extras:
        lengths, later = teacher.extras[MERGED].unbind(-1)
        student = student + _sum_later(comparison, lengths.long())[:, None]
        full, unshared = (part + later[:, None] for part in (full, unshared))
    # Exclude the bucket, because its tokens are ranked individually.
    is_shared = torch.ones(student.shape[-1], dtype=torch.bool, device=student.device)
    is_shared[teacher.outside] = False
    shared = is_shared.nonzero()[:, 0]
    if not matched:
        return sorted_l1(student, torch.cat([full[:, shared], unshared], dim=-1))
    # The published weight counts the tokens of the vocabulary, not their probability mass.
    weight = len(shared) / (len(shared) + unshared.shape[-1])
    same = weight * _sum_matched(comparison, student[:, shared], full[:, shared])
    if not len(teacher.outside):
        return same
    return same + (1.0 - weight) * sorted_l1(student[:, teacher.outside], unshared)


def _sum_later(comparison: SignalComparison, lengths: Tensor) -> Tensor:
    """Return the student's log-probability of the later tokens of each span, 0 at other tokens."""
    logprobs = gather_logprobs(comparison.student, comparison.tokens)
    return add_later(logprobs, lengths) - logprobs


def _sum_matched(comparison: SignalComparison, student: Tensor, teacher: Tensor) -> Tensor:
    return comparison.contributions(student, teacher).sum(dim=-1)
