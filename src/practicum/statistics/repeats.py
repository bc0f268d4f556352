"""Tests on few repeats of an experiment: significance, and the number of repeats that are needed.

Student's distribution has a closed form for whole degrees of freedom (Abramowitz and Stegun 1964,
26.7.3 and 26.7.4), so a paired test over seeds needs no other library.
"""

import math
from collections.abc import Sequence
from itertools import product

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.core.randomness import seed_of
from practicum.statistics.intervals import Interval

LEVEL, POWER = 0.05, 0.8
"""Two-sided error and power of every test of this module."""

EXACT, DRAWS = 12, 9999
"""Sign flips are enumerated for at most `EXACT` values, and drawn `DRAWS` times for more."""

MOST_NEEDED = 100_000
"""Above this number of repeats, `repeats_needed` gives no number."""


def two_sided(t: float, freedom: int) -> float:
    """Return P(|T| >= t) of Student's distribution with a whole number of degrees of freedom."""
    angle = math.atan(abs(t) / math.sqrt(freedom))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    # The finite series in powers of the cosine, each term computed from the previous term. It needs
    # no table and no incomplete beta function; for odd degrees of freedom the angle is added.
    odd = freedom % 2
    term, total = (math.cos(angle), 0.0) if odd else (1.0, 0.0)
    for power in range(1 + odd, freedom, 2):
        total += term
        term *= square * power / (power + 1)
    inside = (2 / math.pi) * (angle + sine * total) if odd else sine * total
    return min(max(1.0 - inside, 0.0), 1.0)


def t_critical(level: float, freedom: int) -> float:
    """Return the t with P(|T| >= t) = level, by bisection."""
    low, high = 0.0, 1.0
    while two_sided(high, freedom) > level and high < 1e12:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided(middle, freedom) > level else (low, middle)
    return high


def t_interval(values: Sequence[float]) -> Interval | None:
    """Return the mean of a few values with its 95 % interval by Student's t; None below two."""
    if len(values) < 2:
        return None
    numbers = torch.tensor(values, dtype=torch.float64)
    mean = numbers.mean().item()
    half = t_critical(LEVEL, len(values) - 1) * _error(numbers)
    return Interval(mean, mean - half, mean + half)


def t_test(differences: Sequence[float]) -> float | None:
    """Return the two-sided p of a zero mean difference (Student 1908); None below two pairs."""
    if len(differences) < 2:
        return None
    numbers = torch.tensor(differences, dtype=torch.float64)
    mean, error = numbers.mean().item(), _error(numbers)
    if error == 0.0:
        return 1.0 if mean == 0.0 else 0.0
    return two_sided(mean / error, len(differences) - 1)


def sign_flips(differences: Sequence[float], seed: int) -> float:
    """Return the two-sided p of paired differences with random signs (Fisher 1935).

    The test is exact for at most `EXACT` differences. Differences of zero are left out: their sign
    has no effect.
    """
    numbers = torch.tensor([value for value in differences if value != 0.0], dtype=torch.float64)
    if not len(numbers):
        return 1.0
    # Slightly below the observed sum: sums of the same numbers in another order may round lower.
    threshold = numbers.sum().abs().item() * (1 - 1e-12)
    if len(numbers) <= EXACT:
        signs = torch.tensor(list(product((1.0, -1.0), repeat=len(numbers))), dtype=torch.float64)
        return (signs @ numbers).abs().ge(threshold).double().mean().item()
    generator = torch.Generator().manual_seed(seed_of(seed, "sign flips"))
    signs = (
        torch.randint(2, (DRAWS, len(numbers)), generator=generator, dtype=torch.float64) * 2 - 1
    )
    # The observed signs count as one more draw, so that p is never 0.
    return (1 + int((signs @ numbers).abs().ge(threshold).sum())) / (1 + DRAWS)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p values adjusted for their number (Holm 1979).

    If every adjusted value below 5 % is called resolved, the probability of any false positive is 5
    %.
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        # An adjusted value may not fall below the adjusted value of a smaller p value.
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def repeats_needed(differences: Sequence[float], tests: int = 1) -> int | None:
    """Return how many pairs would resolve the observed mean difference at 80 % power.

    The spread is taken from the differences; `tests` is the number of tests that share the 5 %.
    None if the mean or the spread is zero or unknown, or if more than `MOST_NEEDED` are needed.
    """
    if len(differences) < 2:
        return None
    numbers = torch.tensor(differences, dtype=torch.float64)
    effect, spread = numbers.mean().abs().item(), numbers.std().item()
    if effect == 0.0 or spread == 0.0:
        return None
    low, high = 1, 2
    # Power grows with the number of pairs: double until it suffices, then bisect.
    while not _enough(high, effect / spread, tests):
        low, high = high, 2 * high
        if high > MOST_NEEDED:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _enough(middle, effect / spread, tests) else (middle, high)
    return high


def _enough(count: int, standardised: float, tests: int) -> bool:
    """Return True if `count` pairs resolve a difference of `standardised` standard deviations.

    Uses the t approximation of the power.
    """
    # Above 1,000 degrees of freedom the distribution no longer changes, and the sum gets long.
    freedom = min(count - 1, 1000)
    return count > 1 and standardised * math.sqrt(count) >= t_critical(
        LEVEL / tests, freedom
    ) + t_critical(2 * (1 - POWER), freedom)


def _error(numbers: Float[Tensor, " n"]) -> float:
    """Return the standard error of the mean."""
    # Equal numbers have zero error, but rounding of their mean would leave a tiny one.
    if bool((numbers == numbers[0]).all()):
        return 0.0
    return numbers.std().item() / math.sqrt(len(numbers))
