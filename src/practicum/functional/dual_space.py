"""Maps between the hidden states of two models, for distillation in both of their spaces
(DSKDv2, arXiv 2504.11426).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Projections:
    """Two linear maps between the student's and the teacher's hidden states, one per direction."""

    to_student: Float[Tensor, "E D"]
    to_teacher: Float[Tensor, "D E"]


@dataclass(frozen=True, slots=True)
class BothSpaces:
    """Log-probabilities of each model's hidden states through the opposite model's head, with
    gradients in the maps.

    The teacher's columns are first the common tokens, then the tokens that only the teacher has.
    `labels` are the student's ids of the teacher's most likely common tokens.
    """

    through_student: Float[Tensor, "T V"]
    through_teacher: Float[Tensor, "T W"]
    teacher: Float[Tensor, "T W"]
    labels: Int[Tensor, " T"]


@torch.no_grad()
def fit_projections(
    student: Float[Tensor, "K D"], teacher: Float[Tensor, "K E"], parts: int = 8192
) -> Projections:
    """Return the maps that best preserve the logits of K tokens, from their rows in both heads.

    They solve `states @ to_teacher @ teacher.T = states @ student.T` for all states by least
    squares, and the same equation from teacher to student. If both can be solved exactly, the two
    maps are inverses.
    """
    # The matrices have the size of the hidden widths, not of vocabularies with 100,000 rows, which
    # are summed in float64.
    squares = [
        first.new_zeros(first.shape[1], second.shape[1], dtype=torch.float64)
        for first, second in ((student, student), (student, teacher), (teacher, teacher))
    ]
    for start in range(0, len(student), parts):
        narrow, wide = (rows[start : start + parts].double() for rows in (student, teacher))
        factors = ((narrow, narrow), (narrow, wide), (wide, wide))
        for total, (first, second) in zip(squares, factors, strict=True):
            total.addmm_(first.T, second)
    of_student, mixed, of_teacher = squares
    inverses = [torch.linalg.pinv(square, hermitian=True) for square in (of_student, of_teacher)]
    return Projections(
        (mixed.T @ inverses[0]).to(student.dtype), (mixed @ inverses[1]).to(student.dtype)
    )
