"""How every function here treats its numbers: float32 inside, and impossible tokens as very improbable ones."""

import torch
from jaxtyping import Float
from torch import Tensor

IMPOSSIBLE = -1e4
"""Stands for -inf where arithmetic is done: its exponential is exactly 0 and its products with 0 are 0, not NaN."""


def precise(values: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """The same numbers in float32, or in float64 where they already are."""
    return values if values.dtype == torch.float64 else values.float()


def finite(logprobs: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Log-probabilities to compute with: precise, and with `IMPOSSIBLE` in the place of -inf."""
    return precise(logprobs).clamp(min=IMPOSSIBLE)
