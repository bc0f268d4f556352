"""A share of a gap, and the smallest difference that a number of prompts can detect."""

import math

import pytest

from practicum.statistics import Interval, minimum_detectable_difference, ratio


def test_a_ratio_is_of_the_sums_and_not_the_mean_of_ratios() -> None:
    found = ratio([1.0, 0.0, 1.0], [1.0, 1.0, 2.0], seed=0)
    assert found is not None and found.mean == pytest.approx(0.5) and found.low <= 0.5 <= found.high


def test_a_ratio_is_exact_where_every_prompt_agrees() -> None:
    assert ratio([1.0] * 9, [2.0] * 9, seed=3) == Interval(0.5, 0.5, 0.5)


def test_a_ratio_to_nothing_is_none_and_repeats_otherwise() -> None:
    assert ratio([1.0, -1.0], [1.0, -1.0], seed=0) is None
    assert ratio([1.0, 0.0], [1.0, 1.0], seed=1) == ratio([1.0, 0.0], [1.0, 1.0], seed=1)


def test_the_detectable_difference_is_two_point_eight_standard_errors() -> None:
    found = minimum_detectable_difference([1.0, -1.0] * 50)
    spread = math.sqrt(100 / 99)
    assert found == pytest.approx((1.959964 + 0.841621) * spread / 10, rel=1e-4)
    assert (
        minimum_detectable_difference([0.3]) is None
        and minimum_detectable_difference([0.5, 0.5]) == 0.0
    )
