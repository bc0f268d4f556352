"""Statistics of the teacher's signal: its concentration, its health and the sampler's mismatch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

MIN_CONSTANT_TOKENS, SAME, CERTAIN = 8, 1e-4, -0.01
"""Limits of `constant`: the fewest tokens, the largest range and the largest log-probability."""

LARGEST_LOG_RATIO = 20.0
"""Log-ratios are clamped to this, so that no single token is infinite."""


def concentration(divergence: Float[Tensor, " T"], share: float = 0.5) -> float | None:
    """Return the smallest share of tokens that holds `share` of the divergence; None if it is 0."""
    ordered = divergence.double().clamp(min=0).sort(descending=True).values.cumsum(0)
    if not len(ordered) or ordered[-1] <= 0:
        return None
    return (int((ordered < share * ordered[-1]).sum()) + 1) / len(ordered)


def constant(logprobs: Float[Tensor, " T"]) -> float | None:
    """Return the log-probability that all tokens have in common; None if they differ.

    A model's log-probabilities differ over eight tokens or more, except near 0: a certain model is
    certain of each token.
    """
    if (
        len(logprobs) < MIN_CONSTANT_TOKENS
        or bool(logprobs.max() - logprobs.min() > SAME)
        or bool(logprobs.max() > CERTAIN)
    ):
        return None
    return float(logprobs.mean())


def participation_ratio(divergence: Float[Tensor, " T"]) -> float | None:
    """Return (sum d)^2 / (T sum d^2): 1 if all tokens are equal; None if all are zero."""
    values = divergence.double()
    squares = values.square().sum()
    return (values.sum() ** 2 / (len(values) * squares)).item() if squares > 0 else None


def has_low_divergence_run(
    divergence: Float[Tensor, " T"], below: float, window: int = 64, windows: int = 4
) -> bool:
    """Return True if `windows` windows in a row stay below `below` nats (arXiv 2606.09471).

    A window has `window` tokens, and its mean divergence counts.
    """
    run = 0
    for agrees in (window_means(divergence, window) < below).tolist():
        run = run + 1 if agrees else 0
        if run >= windows:
            return True
    return False


def window_means(values: Float[Tensor, " T"], window: int) -> Float[Tensor, " w"]:
    """Return the mean of each complete window of `window` tokens, shape `[T // window]`."""
    return values[: len(values) // window * window].reshape(-1, window).mean(dim=1)


def probability_errors(
    learner: Float[Tensor, " T"], sampler: Float[Tensor, " T"]
) -> Float[Tensor, " T"]:
    """Return exp |log p_learner - log p_sampler| of each token: 1 if both engines agree."""
    return (learner - sampler).double().abs().clamp(max=LARGEST_LOG_RATIO).exp()


def probability_error(learner: Float[Tensor, " T"], sampler: Float[Tensor, " T"]) -> float:
    """Return the mean of `probability_errors`, which is NeMo-RL's token_mult_prob_error."""
    return probability_errors(learner, sampler).mean().item()


@dataclass(frozen=True, slots=True)
class ImportanceHealth:
    """Four numbers of importance weights: mean, effective sample share, chi-squared and maximum."""

    mean: float
    effective_share: float
    chi_squared: float
    largest: float


def importance_health(
    learner: Float[Tensor, " T"], sampler: Float[Tensor, " T"]
) -> ImportanceHealth:
    """Return the health of w = p_learner / p_sampler over all tokens.

    The effective share is 1 / mean((w / mean w)^2), the chi-squared distance mean(w^2) - 1.
    """
    weights = (learner - sampler).double().clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    mean, square = weights.mean().item(), weights.square().mean().item()
    return ImportanceHealth(mean, mean * mean / square, square - 1.0, weights.max().item())


def quantiles(values: Float[Tensor, " T"], at: Sequence[float]) -> list[float]:
    """Return quantiles of any number of values; `torch.quantile` stops at 16 million."""
    ordered = values.double().sort().values
    return [ordered[math.floor(share * (len(ordered) - 1) + 0.5)].item() for share in at]
