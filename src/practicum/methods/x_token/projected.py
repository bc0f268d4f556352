"""Compare student and teacher in the teacher's vocabulary, as X-Token's P-KL does."""

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from practicum.errors import TeacherError
from practicum.functional.distributions import SMALLEST_TAIL
from practicum.functional.divergences import SMALLEST
from practicum.functional.projection import decay_weights, pair_columns, project
from practicum.functional.sorting import sorted_l1
from practicum.objective.distribution import SignalComparison
from practicum.objective.estimator_call import EstimatorCall
from practicum.objective.signal_call import Full, SignalCall
from practicum.objective.translated_answer import TranslatedAnswer
from practicum.types import TeacherSignal

SPELLINGS = "spellings"
"""The constant with the rows of `TranslatedAnswer.spell`."""


class Spelled(Full):
    """The full distribution with the teacher's spellings of the tokens that it lacks.

    Only this signal requests it.
    """

    reads_more: ClassVar[bool] = True

    def add_more(self, signal: TeacherSignal, answer: TranslatedAnswer) -> TeacherSignal:
        """Add the spellings of the tokens that the teacher lacks."""
        return replace(signal, constants={**signal.constants, SPELLINGS: answer.spell()})


class Config(SignalCall):
    """The divergence in the teacher's vocabulary, of the projected student distribution.

    The probability of a token that the teacher lacks is distributed over the teacher tokens that
    spell its text, by powers of `decay` (P-KL of X-Token 2605.21699). With `paired`, if the largest
    weight of a token is at least `paired`, the token is compared with the teacher token that has
    this weight; all other tokens are compared by rank (H-KL).
    """

    type: Literal["projected"] = "projected"
    decay: float = Field(default=0.5, ge=0, le=1)
    paired: float | None = Field(default=None, gt=0.5, le=1)
    measures: ClassVar[bool] = True
    compares: ClassVar[bool] = True
    unshared: ClassVar[bool] = True

    @property
    def question(self) -> Spelled:
        """Return the full distribution, with spellings."""
        return Spelled()

    def explain_conflict(self, gradient: EstimatorCall, divergence: str, plain: bool) -> str | None:
        """Refuse every estimator except the derivative."""
        if gradient.pathwise and plain:
            return None
        return (
            "signal 'projected' differentiates a divergence in the teacher's vocabulary; leave out "
            "target and estimator"
        )

    def compare(self, comparison: SignalComparison) -> Tensor:
        """Return the divergence in the teacher's vocabulary."""
        return compare_projected(comparison, self.decay, self.paired)


def compare_projected(
    comparison: SignalComparison, decay: float, paired: float | None = None
) -> Tensor:
    """Return the divergence at each position in the teacher's vocabulary, or by pairs with `paired`.

    A teacher token that receives no student probability has a small constant probability. Raises
    TeacherError for a teacher that does not report how it spells the tokens that it lacks.
    """
    student, teacher = comparison.student, comparison.teacher
    full = teacher.full
    assert full is not None, "the signal asks for whole distributions"
    if teacher.outside is None:
        return comparison.contributions(student, full).sum(dim=-1)
    spellings, unshared = teacher.constants.get(SPELLINGS), teacher.own
    if spellings is None or unshared is None:
        raise TeacherError(
            f"signal 'projected' needs to know how the {comparison.against} writes the tokens that it "
            "lacks, which only a single teacher of type translated reports; set signal: full"
        )
    size = student.shape[-1]
    is_shared = torch.ones(size, dtype=torch.bool, device=student.device)
    is_shared[teacher.outside] = False
    shared, width = is_shared.nonzero()[:, 0], size + unshared.shape[-1]
    tokens, columns, places = spellings.unbind(-1)
    weights = decay_weights(tokens, places, size, decay)
    if paired is not None:
        target = torch.cat([full[:, :-1], unshared], dim=-1)
        pairs = pair_columns(shared, tokens, columns, weights, paired)
        return _compare_pairs(comparison, student, target, *pairs, is_shared)
    probs = project(student, shared, tokens, columns, weights, width)
    is_reached = torch.zeros(width, dtype=torch.bool, device=student.device)
    is_reached[torch.cat([shared, columns[weights > 0]])] = True
    # Drop the columns of tokens that only the student has, which have no mass on either side.
    reached = torch.where(is_reached, probs, SMALLEST_TAIL).clamp(min=SMALLEST).log()
    target = torch.cat([full[:, :-1], unshared], dim=-1)
    used = torch.cat([is_shared, is_reached.new_ones(unshared.shape[-1])]).nonzero()[:, 0]
    return comparison.contributions(reached[:, used], target[:, used]).sum(dim=-1)


def _compare_pairs(
    comparison: SignalComparison,
    student: Tensor,
    target: Tensor,
    tokens: Tensor,
    columns: Tensor,
    is_shared: Tensor,
) -> Tensor:
    """Return the divergence of paired tokens plus the distance by rank of all other tokens (H-KL)."""
    same = comparison.contributions(student[:, tokens], target[:, columns])
    unpaired = torch.ones(student.shape[-1], dtype=torch.bool, device=student.device)
    unpaired[tokens] = False
    unpaired_columns = torch.ones(target.shape[-1], dtype=torch.bool, device=student.device)
    # Exclude the columns of tokens that only the student has.
    unpaired_columns[: len(is_shared)] = is_shared
    unpaired_columns[columns] = False
    ranked = sorted_l1(student[:, unpaired], target[:, unpaired_columns])
    return same.sum(dim=-1) + ranked
