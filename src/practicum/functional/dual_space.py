"""Maps between the hidden states of two models, for distillation in both of their spaces
(DSKDv2, arXiv 2504.11426).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Projections:
    """Two linear maps between the student's and the teacher's hidden states; the first one learns."""

    to_student: Float[Tensor, "E D"]
    to_teacher: Float[Tensor, "D E"]


@dataclass(frozen=True, slots=True)
class BothSpaces:
    """Log-probabilities of each model's hidden states through the opposite model's head.

    The teacher's columns are first the common tokens, then the tokens that only the teacher has.
    `labels` are the student's ids of the teacher's most likely tokens, -1 if the student lacks it.
    """

    through_student: Float[Tensor, "T V"]
    through_teacher: Float[Tensor, "T W"]
    teacher: Float[Tensor, "T W"]
    labels: Int[Tensor, " T"]


@torch.no_grad()
def fit_map(
    source: Float[Tensor, "K D"], target: Float[Tensor, "K E"], parts: int = 8192
) -> Float[Tensor, "D E"]:
    """Return the map that best preserves the logits of K tokens, from their rows in two heads.

    It solves `states @ map @ target.T = states @ source.T` for all states by least squares.
    """
    # The matrices have the size of the hidden widths, not of vocabularies with 100,000 rows, which
    # are summed in float64.
    width = target.shape[1]
    mixed, square = (
        target.new_zeros(size, width, dtype=torch.float64) for size in (source.shape[1], width)
    )
    for start in range(0, len(source), parts):
        narrow, wide = (rows[start : start + parts].double() for rows in (source, target))
        mixed.addmm_(narrow.T, wide)
        square.addmm_(wide.T, wide)
    return (mixed @ torch.linalg.pinv(square, hermitian=True)).to(source.dtype)
