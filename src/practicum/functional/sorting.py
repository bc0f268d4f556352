"""Distances of sorted probabilities: what vocabularies without a common token can be compared by."""

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.functional.precision import precise


def sorted_l1(
    student: Float[Tensor, "*s V"], teacher: Float[Tensor, "*s W"]
) -> Float[Tensor, "*s"]:
    """Return the L1 distance of probabilities sorted from the largest on, the shorter list filled
    with zeros (ULD, arXiv 2402.12030).

    It sees no token's name: it is 0 for any renaming of the teacher's tokens, wrong ones included.
    """
    size = max(student.shape[-1], teacher.shape[-1])
    # Ranks and not tokens: autograd sends each difference back to the token that holds the rank.
    ranked = [
        torch.nn.functional.pad(
            precise(logprobs).exp().sort(dim=-1, descending=True).values,
            (0, size - logprobs.shape[-1]),
        )
        for logprobs in (student, teacher)
    ]
    return (ranked[0] - ranked[1]).abs().sum(dim=-1)
