"""Means with 95 % intervals, and the number of rollouts that a comparison needs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum.core.randomness import seed_of

RESAMPLES = 2000
Z = 1.959964
"""Standard errors on either side of a mean in its 95 % interval."""

ZERO_WIDTH = 1e-9
"""A narrower interval counts as zero width: all samples agree, and the spread is unknown."""

POWER = 7.849
"""(1.960 + 0.842) squared: the factor of a two-sided test at 5 % with a power of 80 %."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of_resamples(cls, mean: float, resamples: Float[Tensor, " r"]) -> "Interval":
        """Return a mean between the 2.5 and 97.5 percentiles of its resamples."""
        return cls(mean, resamples.quantile(0.025).item(), resamples.quantile(0.975).item())

    def __format__(self, number: str) -> str:
        """Render the mean and both ends with the format `number` (default `.2f`)."""
        number = number or ".2f"
        return f"{self.mean:{number}} [{self.low:{number}}, {self.high:{number}}]"

    def __str__(self) -> str:
        return format(self)


def has_width(low: float, high: float) -> bool:
    """Return False if both ends of an interval are the same number."""
    return high - low > ZERO_WIDTH


def contains_zero(interval: Interval) -> bool:
    """Return True if zero lies within the interval."""
    return interval.low <= 0.0 <= interval.high


def bootstrap(values: Float[Tensor, " n"], seed: int) -> Interval:
    """Return the mean with the 2.5 and 97.5 percentiles of its resampled means."""
    return Interval.of_resamples(
        values.mean().item(), values[_resample(len(values), seed, "bootstrap")].mean(dim=1)
    )


def cluster_bootstrap(groups: Sequence[Float[Tensor, " _"]], seed: int) -> Interval:
    """Return the mean over all tokens, with an interval by bootstrap over groups of tokens.

    The groups (prompts) are resampled and never the tokens: tokens of one prompt are not
    independent. Groups without tokens are left out; ValueError if no group has any.
    """
    filled = [group.double() for group in groups if len(group)]
    if not filled:
        raise ValueError("no tokens to average over")
    sums = torch.stack([group.sum() for group in filled])
    counts = torch.tensor([len(group) for group in filled], dtype=torch.float64)
    picks = _resample(len(counts), seed, "clustered")
    means = sums[picks].sum(dim=1) / counts[picks].sum(dim=1)
    return Interval.of_resamples((sums.sum() / counts.sum()).item(), means)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The mean of a sample with its standard error, which is None for a single group."""

    mean: float
    se: float | None

    def __str__(self) -> str:
        error = "" if self.se is None else f" ± {self.se:.3f}"
        return f"{self.mean:.3f}{error}"

    def bound_difference(self, second: "Estimate") -> float | None:
        """Return half the width of the 95 % interval of the difference of two independent estimates.

        None if an error is unknown.
        """
        if self.se is None or second.se is None:
            return None
        return Z * math.hypot(self.se, second.se)


def estimate_mean(columns: Sequence[Float[Tensor, " _"]], groups: Sequence[str]) -> Estimate | None:
    """Estimate the mean over all tokens of all answers; None without a token.

    The standard error is computed for a ratio of two sums over the groups (prompts), because tokens
    of one prompt are not independent.
    """
    totals: dict[str, tuple[float, int]] = {}
    for column, group in zip(columns, groups, strict=True):
        if len(column):
            total, count = totals.get(group, (0.0, 0))
            totals[group] = total + column.double().sum().item(), count + len(column)
    tokens, size = sum(count for _, count in totals.values()), len(totals)
    if not tokens:
        return None
    mean = sum(total for total, _ in totals.values()) / tokens
    if size < 2:
        return Estimate(mean, None)
    squares = sum((total - mean * count) ** 2 for total, count in totals.values())
    return Estimate(mean, math.sqrt(size / (size - 1) * squares) / tokens)


def wilson(successes: float, count: int) -> Interval:
    """Return a proportion with its Wilson (1927) interval, which stays inside [0, 1]."""
    mean = successes / count
    centre = (mean + Z * Z / (2 * count)) / (1 + Z * Z / count)
    spread = (
        Z / (1 + Z * Z / count) * math.sqrt(mean * (1 - mean) / count + Z * Z / (4 * count * count))
    )
    # At 0 and 1 the end is exact in theory and off by a rounding error in floating point.
    low = 0.0 if mean == 0.0 else max(centre - spread, 0.0)
    high = 1.0 if mean == 1.0 else min(centre + spread, 1.0)
    return Interval(mean, low, high)


def ratio(numerators: Sequence[float], denominators: Sequence[float], seed: int) -> Interval | None:
    """Return the ratio of two sums over the same prompts; None if the denominators sum to 0.

    The interval is a bootstrap over the prompts. Resamples with denominators that sum to 0 are left
    out, so first check that the mean of the denominators differs from 0.
    """
    pairs = torch.tensor([numerators, denominators], dtype=torch.float64)
    above, below = pairs.sum(dim=1).tolist()
    if below == 0:
        return None
    sums = pairs[:, _resample(pairs.shape[1], seed, "ratio")].sum(dim=2)
    return Interval.of_resamples(above / below, (sums[0] / sums[1])[sums[1] != 0])


def minimum_detectable_difference(differences: Sequence[float]) -> float | None:
    """Return the smallest mean paired difference that a test finds; None for fewer than two.

    The test is two-sided at 5 % with a power of 80 %.
    """
    if len(differences) < 2:
        return None
    spread = torch.tensor(differences, dtype=torch.float64).std().item()
    return math.sqrt(POWER / len(differences)) * spread


def auroc(scores: Sequence[float], right: Sequence[bool]) -> Interval | None:
    """Return how often a right answer scores above a wrong one, ties counting half.

    None unless both right and wrong answers occur. The interval follows Hanley and McNeil (1982).
    """
    above = _wins(scores, right)
    if above is None:
        return None
    area, (good, bad) = above.mean().item(), above.shape
    first, second = area / (2 - area), 2 * area * area / (1 + area)
    variance = area * (1 - area) + (good - 1) * (first - area**2) + (bad - 1) * (second - area**2)
    spread = Z * math.sqrt(max(variance, 0.0) / (good * bad))
    return Interval(area, max(area - spread, 0.0), min(area + spread, 1.0))


def clustered_auroc(
    scores: Sequence[float], right: Sequence[bool], groups: Sequence[str], seed: int
) -> Interval | None:
    """Return the area of `auroc` with an interval by bootstrap over groups of answers (prompts).

    None unless both right and wrong answers occur. Resamples with only one kind are left out.
    """
    group_index = {group: index for index, group in enumerate(dict.fromkeys(groups))}
    hit, above = torch.tensor(right, dtype=torch.bool), _wins(scores, right)
    if above is None:
        return None
    # [groups, groups] tables of wins and of pairs: a resample that holds each group `counts` times
    # has the area counts' wins counts / counts' pairs counts, without going over answers again.
    indices = torch.tensor([group_index[group] for group in groups])
    member = torch.nn.functional.one_hot(indices).double()
    wins = member[hit].T @ above @ member[~hit]
    pairs = member[hit].sum(0)[:, None] * member[~hit].sum(0)
    picks = _resample(len(group_index), seed, "clustered_auroc")
    counts = torch.nn.functional.one_hot(picks, len(group_index)).sum(1).double()
    all_wins, all_pairs = ((counts @ table * counts).sum(1) for table in (wins, pairs))
    area = (wins.sum() / pairs.sum()).item()
    return Interval.of_resamples(area, (all_wins / all_pairs)[all_pairs > 0])


def _resample(count: int, seed: int, purpose: str) -> Int[Tensor, "r n"]:
    """Draw the indices of each resample of `count` entries, shape `[RESAMPLES, count]`."""
    generator = torch.Generator().manual_seed(seed_of(seed, purpose))
    return torch.randint(count, (RESAMPLES, count), generator=generator)


def _wins(scores: Sequence[float], right: Sequence[bool]) -> Float[Tensor, "g b"] | None:
    """Return 1 for each right answer that scores above a wrong one and 0.5 for ties, as a table.

    None unless both kinds occur.
    """
    values, hit = torch.tensor(scores, dtype=torch.float64), torch.tensor(right, dtype=torch.bool)
    if hit.all() or not hit.any():
        return None
    good, bad = values[hit][:, None], values[~hit]
    return (good > bad).double() + 0.5 * (good == bad).double()


def rollouts_needed(first: float, second: float) -> int | None:
    """Return the number of answers per model that distinguishes two accuracies; None if they are
    equal.

    The test is two-sided at 5 % with a power of 80 %.
    """
    if first == second:
        return None
    variances = first * (1 - first) + second * (1 - second)
    return math.ceil(POWER * variances / (first - second) ** 2)
