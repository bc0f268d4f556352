"""Few repeats of an experiment: what their spread allows to say, and how many more it would take.

Student's distribution is in closed form for whole degrees of freedom (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4), so a
paired test over seeds needs no other library.
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
"""Two-sided error and power of every test here."""

EXACT, DRAWS = 12, 9999
"""Sign flips are enumerated for up to so many values, and drawn so often for more."""

MOST_NEEDED = 100_000
"""More repeats than this are as good as never."""


def two_sided(t: float, freedom: int) -> float:
    """P(|T| >= t) of Student's distribution with a whole number of degrees of freedom."""
    angle = math.atan(abs(t) / math.sqrt(freedom))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = freedom % 2
    term, total = (math.cos(angle), 0.0) if odd else (1.0, 0.0)
    for power in range(1 + odd, freedom, 2):
        total += term
        term *= square * power / (power + 1)
    inside = (2 / math.pi) * (angle + sine * total) if odd else sine * total
    return min(max(1.0 - inside, 0.0), 1.0)


def t_critical(level: float, freedom: int) -> float:
    """The t with P(|T| >= t) = level, by bisection."""
    low, high = 0.0, 1.0
    while two_sided(high, freedom) > level and high < 1e12:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided(middle, freedom) > level else (low, middle)
    return high


def t_interval(values: Sequence[float]) -> Interval | None:
    """The mean of a few values with its 95 % interval by Student's t; None for fewer than two."""
    if len(values) < 2:
        return None
    numbers = torch.tensor(values, dtype=torch.float64)
    mean = numbers.mean().item()
    half = t_critical(LEVEL, len(values) - 1) * _error(numbers)
    return Interval(mean, mean - half, mean + half)


def t_test(differences: Sequence[float]) -> float | None:
    """The two-sided p of paired differences being zero on average (Student 1908); None for fewer than two."""
    if len(differences) < 2:
        return None
    numbers = torch.tensor(differences, dtype=torch.float64)
    mean, error = numbers.mean().item(), _error(numbers)
    if error == 0.0:
        return 1.0 if mean == 0.0 else 0.0
    return two_sided(mean / error, len(differences) - 1)


def sign_flips(differences: Sequence[float], seed: int) -> float:
    """The two-sided p of paired differences having random signs (Fisher 1935): exact for few, drawn for many.

    Differences of zero say nothing and change nothing.
    """
    numbers = torch.tensor([value for value in differences if value != 0.0], dtype=torch.float64)
    if not len(numbers):
        return 1.0
    seen = numbers.sum().abs().item() * (1 - 1e-12)
    if len(numbers) <= EXACT:
        signs = torch.tensor(list(product((1.0, -1.0), repeat=len(numbers))), dtype=torch.float64)
        return (signs @ numbers).abs().ge(seen).double().mean().item()
    generator = torch.Generator().manual_seed(seed_of(seed, "sign flips"))
    signs = (
        torch.randint(2, (DRAWS, len(numbers)), generator=generator, dtype=torch.float64) * 2 - 1
    )
    return (1 + int((signs @ numbers).abs().ge(seen).sum())) / (1 + DRAWS)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p values adjusted for their number (Holm 1979): each below the level holds, with 5 % risk of any mistake."""
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted


def repeats_needed(differences: Sequence[float], tests: int = 1) -> int | None:
    """How many pairs would resolve a mean difference like the one seen, spread as they are, at 80 % power.

    `tests` is how many tests share the 5 %. None where no difference was seen, or the spread is unknown or none.
    """
    if len(differences) < 2:
        return None
    numbers = torch.tensor(differences, dtype=torch.float64)
    effect, spread = numbers.mean().abs().item(), numbers.std().item()
    if effect == 0.0 or spread == 0.0:
        return None
    low, high = 1, 2
    while not _enough(high, effect / spread, tests):
        low, high = high, 2 * high
        if high > MOST_NEEDED:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _enough(middle, effect / spread, tests) else (middle, high)
    return high


def _enough(count: int, standardised: float, tests: int) -> bool:
    """Whether `count` pairs resolve a difference of so many standard deviations (t approximation of the power)."""
    freedom = min(count - 1, 1000)  # the distribution does not change any more
    return count > 1 and standardised * math.sqrt(count) >= t_critical(
        LEVEL / tests, freedom
    ) + t_critical(2 * (1 - POWER), freedom)


def _error(numbers: Float[Tensor, " n"]) -> float:
    """The standard error of a mean; equal numbers have none, whatever rounding says."""
    if bool((numbers == numbers[0]).all()):
        return 0.0
    return numbers.std().item() / math.sqrt(len(numbers))
