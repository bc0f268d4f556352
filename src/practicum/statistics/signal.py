"""How much the teacher's signal says: where it sits, whether it can be trusted, and how far the sampler is off."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

FEW, SAME, CERTAIN = 8, 1e-4, -0.01
"""So many tokens whose log-probabilities differ by no more, and are not nearer to 0, are not a model's."""

LARGEST_LOG_RATIO = 20.0
"""Log-ratios are held within this, so that no single token is infinite."""


def concentration(divergence: Float[Tensor, " T"], share: float = 0.5) -> float | None:
    """The smallest share of tokens that holds `share` of the whole divergence; None where the divergence is nowhere."""
    ordered = divergence.double().clamp(min=0).sort(descending=True).values.cumsum(0)
    if not len(ordered) or ordered[-1] <= 0:
        return None
    return (int((ordered < share * ordered[-1]).sum()) + 1) / len(ordered)


def constant(logprobs: Float[Tensor, " T"]) -> float | None:
    """Return the log-probability that all of eight tokens or more have in common; None where they differ, as a model's do.

    Near 0 many tokens may have the same one: whoever is certain is certain of each.
    """
    if (
        len(logprobs) < FEW
        or bool(logprobs.max() - logprobs.min() > SAME)
        or bool(logprobs.max() > CERTAIN)
    ):
        return None
    return float(logprobs.mean())


def participation_ratio(divergence: Float[Tensor, " T"]) -> float | None:
    """The share of tokens that take part: (sum d)^2 / (T sum d^2), 1 where all are equal; None where all are zero."""
    values = divergence.double()
    squares = values.square().sum()
    return (values.sum() ** 2 / (len(values) * squares)).item() if squares > 0 else None


def has_low_divergence_run(
    divergence: Float[Tensor, " T"], below: float, window: int = 64, windows: int = 4
) -> bool:
    """Whether `windows` windows in a row, of `window` tokens each, agree to less than `below` nats (arXiv 2606.09471)."""
    run = 0
    for agrees in (window_means(divergence, window) < below).tolist():
        run = run + 1 if agrees else 0
        if run >= windows:
            return True
    return False


def window_means(values: Float[Tensor, " T"], window: int) -> Float[Tensor, " w"]:
    """Return the means of the whole windows of `window` tokens each."""
    return values[: len(values) // window * window].reshape(-1, window).mean(dim=1)


def probability_errors(
    learner: Float[Tensor, " T"], sampler: Float[Tensor, " T"]
) -> Float[Tensor, " T"]:
    """Return exp |log p_learner - log p_sampler| of each token, 1 where both engines agree."""
    return (learner - sampler).double().abs().clamp(max=LARGEST_LOG_RATIO).exp()


def probability_error(learner: Float[Tensor, " T"], sampler: Float[Tensor, " T"]) -> float:
    """The mean of exp |log p_learner - log p_sampler|, 1 where both engines agree (NeMo-RL's token_mult_prob_error)."""
    return probability_errors(learner, sampler).mean().item()


@dataclass(frozen=True, slots=True)
class ImportanceHealth:
    """Importance weights in four numbers: their mean, effective sample share, chi-squared distance, largest value."""

    mean: float
    effective_share: float
    chi_squared: float
    largest: float


def importance_health(
    learner: Float[Tensor, " T"], sampler: Float[Tensor, " T"]
) -> ImportanceHealth:
    """The health of w = p_learner / p_sampler: ESS share 1 / mean((w / mean w)^2), chi-squared mean(w^2) - 1."""
    weights = (learner - sampler).double().clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    mean, square = weights.mean().item(), weights.square().mean().item()
    return ImportanceHealth(mean, mean * mean / square, square - 1.0, weights.max().item())


def quantiles(values: Float[Tensor, " T"], at: Sequence[float]) -> list[float]:
    """Quantiles of any number of values (torch's own stop at 16 million)."""
    ordered = values.double().sort().values
    return [ordered[math.floor(share * (len(ordered) - 1) + 0.5)].item() for share in at]
