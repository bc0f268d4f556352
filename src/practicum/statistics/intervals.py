"""Means with their intervals, and how many rollouts a question needs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.randomness import seed_of

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

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


def overlaps_zero(interval: Interval) -> bool:
    """Whether zero lies within the interval."""
    return interval.low <= 0.0 <= interval.high


def bootstrap(values: Float[Tensor, " n"], seed: int) -> Interval:
    """The mean with the 2.5 and 97.5 percentiles of its resampled means."""
    generator = torch.Generator().manual_seed(seed_of(seed, "bootstrap"))
    picks = torch.randint(len(values), (RESAMPLES, len(values)), generator=generator)
    means = values[picks].mean(dim=1)
    low, high = means.quantile(0.025).item(), means.quantile(0.975).item()
    return Interval(values.mean().item(), low, high)


def clustered(groups: Sequence[Float[Tensor, " _"]], seed: int) -> Interval:
    """The mean over all tokens, with an interval by bootstrap over the groups they come in (prompts, never tokens).

    Groups without tokens are left out; ValueError where none has any.
    """
    sums = torch.stack([group.double().sum() for group in groups if len(group)]) if any(map(len, groups)) else None
    if sums is None:
        raise ValueError("no tokens to average over")
    counts = torch.tensor([len(group) for group in groups if len(group)], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed_of(seed, "clustered"))
    picks = torch.randint(len(counts), (RESAMPLES, len(counts)), generator=generator)
    means = sums[picks].sum(dim=1) / counts[picks].sum(dim=1)
    low, high = means.quantile(0.025).item(), means.quantile(0.975).item()
    return Interval((sums.sum() / counts.sum()).item(), low, high)


def wilson(successes: float, count: int) -> Interval:
    """The interval of a proportion (Wilson 1927), which stays inside [0, 1] and is honest near its ends."""
    mean = successes / count
    centre = (mean + Z * Z / (2 * count)) / (1 + Z * Z / count)
    spread = Z / (1 + Z * Z / count) * math.sqrt(mean * (1 - mean) / count + Z * Z / (4 * count * count))
    low = 0.0 if mean == 0.0 else max(centre - spread, 0.0)
    high = 1.0 if mean == 1.0 else min(centre + spread, 1.0)
    return Interval(mean, low, high)


def difference(one: Sequence[float], other: Sequence[float], seed: int) -> Interval:
    """The paired mean of `one - other`, with an interval by bootstrap over the pairs."""
    pairs = torch.tensor([mine - theirs for mine, theirs in zip(one, other, strict=True)], dtype=torch.float64)
    return bootstrap(pairs, seed)


def ratio(numerators: Sequence[float], denominators: Sequence[float], seed: int) -> Interval | None:
    """The ratio of two sums over the same prompts, with an interval by bootstrap over them; None where the lower sum is 0.

    Resamples in which the denominators sum to nothing are left out, so look first whether their own mean differs from 0.
    """
    pairs = torch.tensor([numerators, denominators], dtype=torch.float64)
    above, below = pairs.sum(dim=1).tolist()
    if below == 0:
        return None
    generator = torch.Generator().manual_seed(seed_of(seed, "ratio"))
    sums = pairs[:, torch.randint(pairs.shape[1], (RESAMPLES, pairs.shape[1]), generator=generator)].sum(dim=2)
    found = (sums[0] / sums[1])[sums[1] != 0]
    return Interval(above / below, found.quantile(0.025).item(), found.quantile(0.975).item())


def detectable(differences: Sequence[float]) -> float | None:
    """The smallest mean of such paired differences that a test finds (5 % two-sided, power 80 %); None for fewer than two."""
    if len(differences) < 2:
        return None
    spread = torch.tensor(differences, dtype=torch.float64).std().item()
    return math.sqrt(POWER / len(differences)) * spread


def auroc(scores: Sequence[float], right: Sequence[bool]) -> Interval | None:
    """How often a right answer scores above a wrong one, ties counting half; None without both kinds.

    The interval is that of Hanley and McNeil (1982).
    """
    good = torch.tensor([score for score, hit in zip(scores, right, strict=True) if hit], dtype=torch.float64)
    bad = torch.tensor([score for score, hit in zip(scores, right, strict=True) if not hit], dtype=torch.float64)
    if not len(good) or not len(bad):
        return None
    above = (good[:, None] > bad).double() + 0.5 * (good[:, None] == bad).double()
    area = above.mean().item()
    first, second = area / (2 - area), 2 * area * area / (1 + area)
    variance = area * (1 - area) + (len(good) - 1) * (first - area**2) + (len(bad) - 1) * (second - area**2)
    spread = Z * math.sqrt(max(variance, 0.0) / (len(good) * len(bad)))
    return Interval(area, max(area - spread, 0.0), min(area + spread, 1.0))


def clustered_auroc(
    scores: Sequence[float], right: Sequence[bool], groups: Sequence[str], seed: int
) -> Interval | None:
    """The same area, with an interval by bootstrap over the groups (prompts) that the answers come in.

    None without both kinds. Resamples without both kinds are left out.
    """
    places = {group: place for place, group in enumerate(dict.fromkeys(groups))}
    values = torch.tensor(scores, dtype=torch.float64)
    hit = torch.tensor(right, dtype=torch.bool)
    if hit.all() or not hit.any():
        return None
    member = torch.nn.functional.one_hot(torch.tensor([places[group] for group in groups])).double()
    above = (values[hit][:, None] > values[~hit]).double() + 0.5 * (values[hit][:, None] == values[~hit]).double()
    wins, pairs = member[hit].T @ above @ member[~hit], member[hit].sum(0)[:, None] * member[~hit].sum(0)
    generator = torch.Generator().manual_seed(seed_of(seed, "clustered_auroc"))
    picks = torch.randint(len(places), (RESAMPLES, len(places)), generator=generator)
    counts = torch.nn.functional.one_hot(picks, len(places)).sum(1).double()
    won, all_pairs = ((counts @ table * counts).sum(1) for table in (wins, pairs))
    areas = (won / all_pairs)[all_pairs > 0]
    low, high = areas.quantile(0.025).item(), areas.quantile(0.975).item()
    return Interval((wins.sum() / pairs.sum()).item(), low, high)


def rollouts_needed(one: float, other: float) -> int | None:
    """Answers of each of two models that tell their accuracies apart (5 % two-sided, power 80 %); None where equal."""
    if one == other:
        return None
    return math.ceil(POWER * (one * (1 - one) + other * (1 - other)) / (one - other) ** 2)
