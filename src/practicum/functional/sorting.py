"""Distances of sorted probabilities, which also compare vocabularies without a common token."""

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.functional.precision import precise


def sorted_l1(
    student: Float[Tensor, "*s V"], teacher: Float[Tensor, "*s W"]
) -> Float[Tensor, "*s"]:
    """Return the L1 distance of probabilities in descending order, the shorter list padded with
    zeros (ULD, arXiv 2402.12030).

    It ignores the identity of tokens: it is 0 for any permutation of the teacher's tokens,
    including wrong ones.
    """
    size = max(student.shape[-1], teacher.shape[-1])
    # Differences are per rank: autograd sends each difference back to the token at this rank.
    ranked = [
        torch.nn.functional.pad(
            precise(logprobs).exp().sort(dim=-1, descending=True).values,
            (0, size - logprobs.shape[-1]),
        )
        for logprobs in (student, teacher)
    ]
    return (ranked[0] - ranked[1]).abs().sum(dim=-1)
