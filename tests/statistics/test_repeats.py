import math
import random

import pytest

from practicum.statistics import holm, repeats_needed, sign_flips, t_interval, t_test
from practicum.statistics.repeats import t_critical, two_sided


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042), (120, 1.980)],
)
def test_the_critical_values_are_those_of_the_tables(freedom, expected):
    assert t_critical(0.05, freedom) == pytest.approx(expected, abs=5e-4)
    assert two_sided(t_critical(0.01, freedom), freedom) == pytest.approx(0.01, rel=1e-9)


def test_two_sided_is_one_at_zero_and_falls():
    for freedom in (1, 2, 5, 8):
        tails = [two_sided(t, freedom) for t in (0.0, 0.5, 1.0, 2.0, 5.0)]
        assert tails[0] == 1.0
        assert tails == sorted(tails, reverse=True)


def test_a_t_interval_by_hand():
    interval = t_interval([1.0, 2.0, 3.0])
    assert interval is not None
    assert interval.mean == 2.0
    assert interval.high - 2.0 == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert t_interval([1.0]) is None


def test_a_paired_t_test_by_hand():
    assert t_test([1.0, 2.0, 3.0]) == pytest.approx(
        0.074180, abs=1e-6
    )  # t = 2 / (1 / sqrt 3) on 2 degrees of freedom
    assert t_test([0.0, 0.0, 0.0]) == 1.0
    assert t_test([0.1, 0.1, 0.1]) == 0.0
    assert t_test([0.5]) is None


def test_sign_flips_are_exact_for_few():
    assert sign_flips([1.0, 1.0, 1.0, 1.0], seed=0) == 2 / 16
    assert sign_flips([1.0, -1.0, 0.0], seed=0) == 1.0
    assert sign_flips([0.0] * 40, seed=0) == 1.0


def test_sign_flips_hold_their_level():
    draw = random.Random(0)
    p_values = [
        sign_flips([draw.choice((-1.0, 0.0, 1.0)) for _ in range(30)], seed) for seed in range(200)
    ]
    assert sum(p < 0.05 for p in p_values) <= 18  # 5 % of 200, and 2.6 standard errors


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []
    assert holm([0.6, 0.9]) == [1.0, 1.0]


def test_repeats_needed_resolve_at_eighty_per_cent():
    differences = [0.5, 1.5, -0.5, 2.5]  # mean 1, standard deviation 1.29
    needed = repeats_needed(differences)
    assert (
        needed == 16
    )  # 7.85 * 1.29^2 = 13.1, and the additional cost of Student's t over the normal
    assert repeats_needed(differences, tests=3) > needed
    draw = random.Random(1)
    hits = sum(t_test([draw.gauss(1.0, 1.29) for _ in range(needed)]) < 0.05 for _ in range(400))
    assert 0.74 < hits / 400 < 0.88


def test_nothing_to_resolve_needs_no_number():
    assert repeats_needed([0.1]) is None
    assert repeats_needed([1.0, -1.0]) is None
    assert repeats_needed([0.2, 0.2]) is None
    assert repeats_needed([1e-9, -1e-9, 1e-6, -1e-6 + 1e-13]) is None
