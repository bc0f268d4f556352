"""Number formats of the functions in this package: float32 arithmetic, and very improbable tokens
instead of impossible ones.
"""

import torch
from jaxtyping import Float
from torch import Tensor

IMPOSSIBLE = -1e4
"""Replaces -inf in arithmetic: its exponential and its products with 0 are exactly 0, not NaN."""


def precise(values: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Return the same numbers in float32, or unchanged if they are float64."""
    return values if values.dtype == torch.float64 else values.float()


def finite(logprobs: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Return log-probabilities to compute with: float32 or better, `IMPOSSIBLE` instead of -inf."""
    return precise(logprobs).clamp(min=IMPOSSIBLE)
