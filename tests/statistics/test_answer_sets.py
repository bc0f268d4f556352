"""Many answers to one prompt, against enumeration."""

from collections.abc import Sequence
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.statistics import (
    calibration_error,
    distinct_ngrams,
    equal_share,
    estimate_pass_rates,
    majority_agreement,
    pass_at_k,
    similarity,
    unique_share,
)


@given(
    st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))
)
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(case: tuple[int, int, int]) -> None:
    count, right, k = case
    answers = [place < right for place in range(count)]
    draws = list(combinations(answers, k))
    assert pass_at_k(count, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.85, 1.0])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_pass_at_k_of_sampled_answers_is_unbiased(count: int, chance: float) -> None:
    """Check over all outcomes of `count` answers: the mean is the chance that one of k answers is right."""
    for k in range(1, count + 1):
        mean = sum(
            chance ** sum(outcome)
            * (1 - chance) ** (count - sum(outcome))
            * pass_at_k(count, sum(outcome), k)
            for outcome in product((0, 1), repeat=count)
        )
        assert mean == pytest.approx(1 - (1 - chance) ** k)


def test_pass_rates_are_means_over_prompts_with_intervals_over_prompts() -> None:
    right = [[True, False, False, False], [False] * 4, [True, True, False, True]]
    rates = estimate_pass_rates(right, seed=0)
    assert list(rates) == [1, 2, 4]
    assert rates[1].mean == pytest.approx((1 / 4 + 0 + 3 / 4) / 3)
    assert rates[2].mean == pytest.approx((1 / 2 + 0 + 1) / 3)
    assert rates[4].mean == pytest.approx(2 / 3)
    assert all(rate.low < rate.mean < rate.high for rate in rates.values())
    assert rates == estimate_pass_rates(right, seed=0) and estimate_pass_rates(
        [[True] * 3], 0
    ).keys() == {1, 2, 3}


@pytest.mark.parametrize("k", [0, 5])
def test_pass_at_more_than_there_are_is_an_error(k: int) -> None:
    with pytest.raises(ValueError, match="between 1 and the 4 answers there are"):
        pass_at_k(4, 2, k)


def test_ngrams_are_counted_over_answers_of_equal_length() -> None:
    assert distinct_ngrams([[1, 2, 3, 9, 9], [1, 2, 4]], 2) == pytest.approx(3 / 4)
    assert distinct_ngrams([[1, 1, 1, 1]], 1) == 0.25
    assert distinct_ngrams([[1], [2]], 2) is None and distinct_ngrams([], 1) is None


def test_equal_answers_are_counted_over_prompts() -> None:
    assert equal_share([["a"], ["a"], ["b"], ["a"]]) == 0.75
    assert equal_share([["a", "a"], ["b", "a"], ["c", "d"], ["e"]]) == 0.5
    assert equal_share([["a"], ["b"], ["c"]]) == 0.0, "no answer was given twice"
    assert equal_share([["a", "a"]]) == equal_share([]) == 0.0, "a single prompt"


def test_shares_of_answers() -> None:
    assert unique_share(["a", "b", "a", "a"]) == 0.5
    assert majority_agreement(["a", "b", "a", "a"], [True, False, True, True]) == (0.75, 1.0)
    assert majority_agreement(["a", "b", "b"], [True, False, False]) == (2 / 3, 0.0)


def test_similarity_is_over_pairs() -> None:
    assert similarity([[1, 2], [1, 2], [3, 4]]) == pytest.approx(1 / 3)
    assert similarity([[1, 2, 3, 4], [1, 2]]) == pytest.approx(2 * 2 / 6)
    assert similarity([[1]]) is None


def test_confidence_that_is_earned_has_no_error() -> None:
    confidences = [0.25] * 4 + [0.75] * 4
    assert calibration_error(
        confidences, [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0], bins=2
    ) == pytest.approx(0.0)
    assert calibration_error([1.0] * 4, [1.0, 0.0, 0.0, 0.0], bins=1) == pytest.approx(0.75)


@given(
    st.lists(
        st.tuples(st.floats(0, 1), st.integers(0, 1)),
        min_size=1,
        max_size=20,
        unique_by=lambda row: row[0],
    ),
    st.integers(1, 12),
)
def test_the_calibration_error_is_the_mean_gap_of_equal_bins(
    rows: Sequence[tuple[float, int]], bins: int
) -> None:
    ordered = sorted(rows)
    parts = [
        ordered[len(ordered) * b // bins : len(ordered) * (b + 1) // bins] for b in range(bins)
    ]
    expected = sum(
        len(part)
        / len(rows)
        * abs(sum(c for c, _ in part) / len(part) - sum(r for _, r in part) / len(part))
        for part in parts
        if part
    )
    found = calibration_error([c for c, _ in rows], [float(r) for _, r in rows], bins)
    assert found == pytest.approx(expected) and 0.0 <= found <= 1.0


def test_the_order_of_equally_confident_answers_does_not_matter() -> None:
    """Check that the order of answers with equal confidence does not matter."""
    confidences, right = [0.5] * 4, [1.0, 0.0, 1.0, 0.0]
    assert calibration_error(confidences, right, bins=2) == pytest.approx(
        calibration_error(confidences, right[::-1], bins=2)
    )
    assert calibration_error(confidences, right, bins=4) == pytest.approx(0.0)
