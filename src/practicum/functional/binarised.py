"""Binarised divergences: the probability of a span of tokens against anything else (ALM, arXiv
2503.20083).

Two models with different tokenizers share no distribution, but each has a probability of a span of
text, p = exp(l). Whether a model writes the span is a Bernoulli variable, so any divergence of
distributions is also a divergence of spans. By data processing, an f-divergence of the two
Bernoulli variables is at most the divergence of the whole distributions over spans. A temperature
tau takes p to the power 1 / tau: as it grows, tau times the forward KL tends to (l_T - l_S) + l_T
log(l_S / l_T), which is sensitive to probabilities that are too small for the plain divergence.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.functional.distributions import SMALLEST_TAIL
from practicum.functional.divergence_entry import Divergence
from practicum.functional.precision import precise

LEAST = math.log1p(-SMALLEST_TAIL)
"""The largest log-probability of a span: its complement has the mass of the smallest tail."""


def binarise(logprobs: Float[Tensor, "*s"], tau: float = 1.0) -> Float[Tensor, "*s 2"]:
    """Return the log-probabilities of a span and of its complement, at a temperature.

    The complement is never smaller than the smallest tail, where it is constant.
    """
    if not tau > 0:
        raise ValueError(f"tau must be positive, got {tau:g}")
    inside = precise(logprobs) / tau
    # expm1 keeps the digits of a complement near 0, where 1 - exp loses all of them.
    outside = torch.log(-torch.expm1(inside.clamp(max=LEAST)))
    return torch.stack([inside, outside], dim=-1)


def binarised(
    divergence: Divergence,
    student: Float[Tensor, "*s"],
    teacher: Float[Tensor, "*s"],
    tau: float = 1.0,
    parameter: float | None = None,
) -> Float[Tensor, "*s"]:
    """Return the divergence of two Bernoulli variables, from the log-probabilities of spans.

    It is 0 only where both models find the span equally likely.
    """
    return divergence.value(binarise(student, tau), binarise(teacher, tau), parameter)
