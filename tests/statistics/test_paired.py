"""Paired differences: by hand, by the coverage counted over all outcomes, and against their definitions."""

import itertools
import math
from collections.abc import Callable

import mpmath
import pytest
import torch

from practicum.statistics import (
    Interval,
    bootstrap,
    difference,
    mean_score,
    score_interval,
    t_interval,
    wilson,
)
from practicum.statistics.paired import FEWEST_PROMPTS
from practicum.statistics.repeats import t_critical, two_sided


def test_a_gain_on_every_one_of_two_prompts_is_not_certain() -> None:
    """Check two equal differences: a bootstrap would give [1.00, 1.00]."""
    gain = difference([1.0, 1.0], [0.0, 0.0], 0)
    assert gain.mean == gain.high == 1.0
    assert gain.low < 0.0, "two prompts cannot tell the gain from none"


@pytest.mark.parametrize("counts", [(12, 2, 50), (0, 3, 10), (5, 5, 11), (4, 0, 36)])
def test_an_end_is_where_the_score_test_only_just_rejects(counts: tuple[int, int, int]) -> None:
    """Check against the slow twin, which finds the most likely share of lost pairs by search, as Tango (1998) defines."""
    gained, lost, count = counts
    interval = score_interval(*counts)
    for end in (interval.low, interval.high):

        def likelihood(share: float, end: float = end) -> float:
            chances = (share + end, share, 1 - 2 * share - end)
            pairs = zip((gained, lost, count - gained - lost), chances, strict=True)
            return sum(times * math.log(max(chance, 1e-300)) for times, chance in pairs if times)

        lowest, highest = max(0.0, -end), (1 - end) / 2
        share = find_peak(likelihood, lowest, highest)
        variance = (2 * share + end - end * end) / count
        surplus = (gained - lost) / count - end
        assert abs(surplus) / math.sqrt(variance) == pytest.approx(1.959964, rel=1e-4)


def find_peak(height: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function with one peak is highest, by repeatedly cutting a third of the range away."""
    for _ in range(100):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (left, high) if height(left) < height(right) else (low, right)
    return (low + high) / 2


@pytest.mark.parametrize("count", [2, 5, 10, 20])
def test_the_interval_holds_the_difference_as_often_as_it_says(count: int) -> None:
    """Add up the chance of every outcome, for differences over the whole triangle."""
    outcomes = [(b, c) for b in range(count + 1) for c in range(count + 1 - b)]
    intervals = {outcome: score_interval(*outcome, count) for outcome in outcomes}
    coverages = []
    for up, down in itertools.product(range(0, 21, 2), repeat=2):
        if up + down > 20:
            continue
        gain, loss = up / 20, down / 20
        coverages.append(
            sum(
                math.comb(count, b)
                * math.comb(count - b, c)
                * gain**b
                * loss**c
                * max(1 - gain - loss, 0.0) ** (count - b - c)
                for (b, c), interval in intervals.items()
                if interval.low - 1e-9 <= gain - loss <= interval.high + 1e-9
            )
        )
    assert sum(coverages) / len(coverages) >= 0.95
    assert min(coverages) >= (0.85 if count < FEWEST_PROMPTS else 0.90)


@pytest.mark.parametrize("count", [1, 3, 12, 36])
def test_swapping_the_samples_mirrors_the_interval(count: int) -> None:
    for gained in range(count + 1):
        lost = (count - gained) // 2
        one, other = score_interval(gained, lost, count), score_interval(lost, gained, count)
        assert (one.low, one.high) == pytest.approx((-other.high, -other.low), abs=1e-12)
        assert one.low <= one.mean <= one.high and one.low < one.high
        assert one.low >= -1.0 and one.high <= 1.0


def test_differences_of_another_size_are_scaled() -> None:
    """Check that rewards of -1 and +1 have twice the differences of 0 and 1, and twice the interval."""
    plain = difference([1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0], 0)
    doubled = difference([1.0, -1.0, 1.0, 1.0], [-1.0, -1.0, 1.0, -1.0], 0)
    assert (doubled.low, doubled.high) == pytest.approx((2 * plain.low, 2 * plain.high))


def test_differences_of_many_sizes_are_bootstrapped_or_have_students_t() -> None:
    first = [0.1 * step for step in range(12)]
    second = [0.07 * step * step / 11 for step in range(12)]
    differences = [a - b for a, b in zip(first, second, strict=True)]
    values = torch.tensor(differences, dtype=torch.float64)
    assert difference(first, second, 3) == bootstrap(values, 3)
    few = FEWEST_PROMPTS - 1
    assert difference(first[:few], second[:few], 3) == t_interval(differences[:few])
    with pytest.raises(ValueError, match="zip"):
        difference([1.0], [1.0, 2.0], 0)


def test_equal_shares_have_an_interval_with_a_width() -> None:
    """Check that four right answers of four to each of three prompts do not make 1.00 certain."""
    assert mean_score([1.0, 1.0, 1.0], 0) == wilson(3.0, 3)
    assert mean_score([0.5, 0.5], 0) == wilson(1.0, 2)
    assert mean_score([2.5, 2.5], 0) == Interval(2.5, 2.5, 2.5), "no share: nothing is known"


@pytest.mark.parametrize("freedom", [1, 2, 7, 40])
def test_students_distribution_is_the_incomplete_beta_function(freedom: int) -> None:
    """Check that both tails beyond t hold I(n / (n + t^2); n / 2, 1 / 2), regularised."""

    def measure_tails(t: float) -> float:
        share = freedom / (freedom + t * t)
        return float(mpmath.betainc(freedom / 2, 0.5, 0, share, regularized=True))

    assert two_sided(1.7, freedom) == pytest.approx(measure_tails(1.7), rel=1e-9)
    assert measure_tails(t_critical(0.05, freedom)) == pytest.approx(0.05, rel=1e-9)


@pytest.mark.parametrize(("hits", "count"), [(0, 7), (3, 7), (36, 36)])
def test_wilsons_ends_are_shares_that_a_score_test_only_just_rejects(hits: int, count: int) -> None:
    interval = wilson(hits, count)
    for end in (interval.low, interval.high):
        distance = (hits / count - end) ** 2
        assert distance == pytest.approx(1.959964**2 * end * (1 - end) / count, abs=1e-6)
    assert interval.low <= hits / count <= interval.high
