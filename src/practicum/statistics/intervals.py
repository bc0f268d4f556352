"""Means with their intervals, and how many rollouts a question needs."""

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
        """Show the mean and both ends, each as the format `number` says (`.2f` if empty): `f"{interval:+.3f}"`."""
        number = number or ".2f"
        return f"{self.mean:{number}} [{self.low:{number}}, {self.high:{number}}]"

    def __str__(self) -> str:
        return format(self)


def contains_zero(interval: Interval) -> bool:
    """Whether zero lies within the interval."""
    return interval.low <= 0.0 <= interval.high


def bootstrap(values: Float[Tensor, " n"], seed: int) -> Interval:
    """The mean with the 2.5 and 97.5 percentiles of its resampled means."""
    return Interval.of_resamples(
        values.mean().item(), values[_resample(len(values), seed, "bootstrap")].mean(dim=1)
    )


def cluster_bootstrap(groups: Sequence[Float[Tensor, " _"]], seed: int) -> Interval:
    """The mean over all tokens, with an interval by bootstrap over the groups they come in (prompts, never tokens).

    Groups without tokens are left out; ValueError where none has any.
    """
    sums = (
        torch.stack([group.double().sum() for group in groups if len(group)])
        if any(map(len, groups))
        else None
    )
    if sums is None:
        raise ValueError("no tokens to average over")
    counts = torch.tensor([len(group) for group in groups if len(group)], dtype=torch.float64)
    picks = _resample(len(counts), seed, "clustered")
    means = sums[picks].sum(dim=1) / counts[picks].sum(dim=1)
    return Interval.of_resamples((sums.sum() / counts.sum()).item(), means)


def wilson(successes: float, count: int) -> Interval:
    """The interval of a proportion (Wilson 1927), which stays inside [0, 1] and is honest near its ends."""
    mean = successes / count
    centre = (mean + Z * Z / (2 * count)) / (1 + Z * Z / count)
    spread = (
        Z / (1 + Z * Z / count) * math.sqrt(mean * (1 - mean) / count + Z * Z / (4 * count * count))
    )
    low = 0.0 if mean == 0.0 else max(centre - spread, 0.0)
    high = 1.0 if mean == 1.0 else min(centre + spread, 1.0)
    return Interval(mean, low, high)


def difference(one: Sequence[float], other: Sequence[float], seed: int) -> Interval:
    """The paired mean of `one - other`, with an interval by bootstrap over the pairs."""
    pairs = torch.tensor(
        [mine - theirs for mine, theirs in zip(one, other, strict=True)], dtype=torch.float64
    )
    return bootstrap(pairs, seed)


def ratio(numerators: Sequence[float], denominators: Sequence[float], seed: int) -> Interval | None:
    """The ratio of two sums over the same prompts, with an interval by bootstrap over them; None where the lower sum is 0.

    Resamples in which the denominators sum to nothing are left out, so look first whether their own mean differs from 0.
    """
    pairs = torch.tensor([numerators, denominators], dtype=torch.float64)
    above, below = pairs.sum(dim=1).tolist()
    if below == 0:
        return None
    sums = pairs[:, _resample(pairs.shape[1], seed, "ratio")].sum(dim=2)
    return Interval.of_resamples(above / below, (sums[0] / sums[1])[sums[1] != 0])


def minimum_detectable_difference(differences: Sequence[float]) -> float | None:
    """The smallest mean of such paired differences that a test finds (5 % two-sided, power 80 %); None for fewer than two."""
    if len(differences) < 2:
        return None
    spread = torch.tensor(differences, dtype=torch.float64).std().item()
    return math.sqrt(POWER / len(differences)) * spread


def auroc(scores: Sequence[float], right: Sequence[bool]) -> Interval | None:
    """How often a right answer scores above a wrong one, ties counting half; None without both kinds.

    The interval is that of Hanley and McNeil (1982).
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
    """The same area, with an interval by bootstrap over the groups (prompts) that the answers come in.

    None without both kinds. Resamples without both kinds are left out.
    """
    places = {group: place for place, group in enumerate(dict.fromkeys(groups))}
    hit, above = torch.tensor(right, dtype=torch.bool), _wins(scores, right)
    if above is None:
        return None
    member = torch.nn.functional.one_hot(torch.tensor([places[group] for group in groups])).double()
    wins, pairs = (
        member[hit].T @ above @ member[~hit],
        member[hit].sum(0)[:, None] * member[~hit].sum(0),
    )
    picks = _resample(len(places), seed, "clustered_auroc")
    counts = torch.nn.functional.one_hot(picks, len(places)).sum(1).double()
    won, all_pairs = ((counts @ table * counts).sum(1) for table in (wins, pairs))
    return Interval.of_resamples(
        (wins.sum() / pairs.sum()).item(), (won / all_pairs)[all_pairs > 0]
    )


def _resample(count: int, seed: int, purpose: str) -> Int[Tensor, "r n"]:
    """Draw which of `count` things each resample of a bootstrap holds."""
    generator = torch.Generator().manual_seed(seed_of(seed, purpose))
    return torch.randint(count, (RESAMPLES, count), generator=generator)


def _wins(scores: Sequence[float], right: Sequence[bool]) -> Float[Tensor, "g b"] | None:
    """Return 1 where a right answer scores above a wrong one, and 0.5 where they tie; None without both kinds."""
    values, hit = torch.tensor(scores, dtype=torch.float64), torch.tensor(right, dtype=torch.bool)
    if hit.all() or not hit.any():
        return None
    good, bad = values[hit][:, None], values[~hit]
    return (good > bad).double() + 0.5 * (good == bad).double()


def rollouts_needed(one: float, other: float) -> int | None:
    """Answers of each of two models that tell their accuracies apart (5 % two-sided, power 80 %); None where equal."""
    if one == other:
        return None
    return math.ceil(POWER * (one * (1 - one) + other * (1 - other)) / (one - other) ** 2)
