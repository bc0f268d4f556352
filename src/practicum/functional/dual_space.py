"""Maps between the hidden states of two models, for distillation in both of their spaces
(DSKDv2, arXiv 2504.11426).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Projections:
    """One linear map each way between the student's states and the teacher's."""

    to_student: Float[Tensor, "E D"]
    to_teacher: Float[Tensor, "D E"]


@dataclass(frozen=True, slots=True)
class BothSpaces:
    """Both models' states read by each other's head, with gradients in the maps.

    The teacher's columns are the tokens that both have and then its own. `labels` are the student's
    ids of the teacher's likeliest tokens among the common ones.
    """

    through_student: Float[Tensor, "T V"]
    through_teacher: Float[Tensor, "T W"]
    teacher: Float[Tensor, "T W"]
    labels: Int[Tensor, " T"]


@torch.no_grad()
def fit_projections(
    student: Float[Tensor, "K D"], teacher: Float[Tensor, "K E"], parts: int = 8192
) -> Projections:
    """Return the maps that keep the logits of K tokens best, from their rows in both heads.

    They solve `states @ to_teacher @ teacher.T = states @ student.T` for all states by least
    squares, and the other way round; where both can be solved, one is the inverse of the other.
    """
    # Squares of widths and not of vocabularies: real ones have 100,000 rows, summed in float64.
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
