"""Compare the probabilities of two vocabularies by rank, as ULD and GOLD do."""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from practicum.errors import TeacherError
from practicum.functional.sorting import sorted_l1
from practicum.objective.distribution import SignalComparison
from practicum.objective.estimator_call import EstimatorCall
from practicum.objective.signal_call import Full, SignalCall


class Config(SignalCall):
    """The L1 distance of sorted probabilities, independent of their tokens (ULD 2402.12030).

    With `matched` the tokens that both vocabularies have are compared by the divergence, weighted by
    their share of the teacher's vocabulary, and the remaining tokens are sorted (GOLD).
    """

    type: Literal["sorted"] = "sorted"
    matched: bool = False
    measures: ClassVar[bool] = True
    compares: ClassVar[bool] = True
    unshared: ClassVar[bool] = True

    @property
    def question(self) -> Full:
        """Return the full distribution."""
        return Full()

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
    (GOLD). Raises TeacherError for a teacher that only reports the sum of its other tokens.
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
    # Exclude the bucket, because its tokens are ranked individually.
    is_shared = torch.ones(student.shape[-1], dtype=torch.bool, device=student.device)
    is_shared[teacher.outside] = False
    shared = is_shared.nonzero()[:, 0]
    if not matched:
        return sorted_l1(student, torch.cat([full[:, shared], unshared], dim=-1))
    # The published weight counts the tokens of the vocabulary, not their probability mass.
    weight = len(shared) / (len(shared) + unshared.shape[-1])
    ranked = sorted_l1(student[:, teacher.outside], unshared)
    same = _sum_matched(comparison, student[:, shared], full[:, shared])
    return weight * same + (1.0 - weight) * ranked


def _sum_matched(comparison: SignalComparison, student: Tensor, teacher: Tensor) -> Tensor:
    return comparison.contributions(student, teacher).sum(dim=-1)
