"""Means with intervals: hand-computed values, laws, and their coverage."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.statistics import (
    Interval,
    auroc,
    bootstrap,
    cluster_bootstrap,
    clustered_auroc,
    contains_zero,
    rollouts_needed,
    wilson,
)

SCORES = st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=2, max_size=12)


def test_a_share_at_an_end_stays_there_exactly() -> None:
    assert wilson(0.0, 7).low == 0.0 and wilson(7.0, 7).high == 1.0
    assert wilson(0.0, 48).low == 0.0, "no rounding dust below the mean"


@pytest.mark.parametrize(
    ("interval", "expected"),
    [((-1.0, 1.0), True), ((0.0, 1.0), True), ((0.1, 1.0), False), ((-2.0, -1.0), False)],
)
def test_zero_is_within_or_not(interval: tuple[float, float], expected: bool) -> None:
    assert contains_zero(Interval(0.5, *interval)) is expected


def test_a_bootstrap_interval_holds_the_mean_about_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(0)
    held = 0
    for number in range(400):
        values = torch.randn(64, generator=generator, dtype=torch.float64) + 1.0
        interval = bootstrap(values, number)
        held += interval.low <= 1.0 <= interval.high
    assert 0.91 <= held / 400 <= 0.98


@pytest.mark.long
def test_tokens_of_one_prompt_are_not_independent() -> None:
    """Check variance between prompts: intervals over prompts cover the mean, intervals over tokens far too seldom."""
    generator = torch.Generator().manual_seed(1)
    held = naive = 0
    for number in range(300):
        groups = [
            torch.full((30,), value) for value in torch.randn(40, generator=generator).tolist()
        ]
        over_prompts = cluster_bootstrap(groups, number)
        held += over_prompts.low <= 0.0 <= over_prompts.high
        if number < 40:
            over_tokens = bootstrap(torch.cat(groups).double(), number)
            naive += over_tokens.low <= 0.0 <= over_tokens.high
    assert 0.89 <= held / 300 <= 0.98 and naive / 40 < 0.5


def test_a_clustered_mean_is_over_tokens_and_leaves_empty_groups_out() -> None:
    found = cluster_bootstrap(
        [torch.tensor([1.0, 2.0, 3.0]), torch.zeros(0), torch.tensor([10.0])], 0
    )
    assert (
        found.mean == pytest.approx(4.0)
        and found.low == pytest.approx(2.0)
        and found.high == pytest.approx(10.0)
    )
    assert cluster_bootstrap([torch.tensor([1.0])], 0) == Interval(1.0, 1.0, 1.0)


def test_no_tokens_have_no_mean() -> None:
    for groups in ([], [torch.zeros(0)]):
        with pytest.raises(ValueError, match="no tokens to average over"):
            cluster_bootstrap(groups, 0)


def test_clusters_of_one_token_each_are_a_plain_bootstrap() -> None:
    values = torch.randn(50, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    one, other = cluster_bootstrap(list(values[:, None]), 3), bootstrap(values, 3)
    assert one.mean == pytest.approx(other.mean)
    assert one.low == pytest.approx(other.low, abs=0.05) and one.high == pytest.approx(
        other.high, abs=0.05
    )


@given(SCORES)
def test_the_area_is_the_share_of_pairs_in_order(rows: list[tuple[int, bool]]) -> None:
    scores, right = [float(score) for score, _ in rows], [hit for _, hit in rows]
    pairs = [(a, b) for (a, good), (b, bad) in itertools.product(rows, rows) if good and not bad]
    found = auroc(scores, right)
    if not pairs:
        assert found is None and clustered_auroc(scores, right, ["x"] * len(rows), 0) is None
        return
    expected = sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs)
    assert found is not None and found.mean == pytest.approx(expected)
    assert 0.0 <= found.low <= found.mean <= found.high <= 1.0
    grouped = clustered_auroc(scores, right, [str(place // 2) for place in range(len(rows))], 0)
    assert grouped is not None and grouped.mean == pytest.approx(expected)


def test_reversing_the_scores_mirrors_the_area() -> None:
    scores, right = [0.1, 0.9, 0.4, 0.8, 0.7], [False, True, True, False, True]
    one, other = auroc(scores, right), auroc([-score for score in scores], right)
    assert one is not None and other is not None
    assert one.mean == pytest.approx(1 - other.mean)


@pytest.mark.parametrize(("good", "bad", "expected"), [(32, 32, 0.061), (13, 51, 0.084)])
def test_the_spread_of_an_area_is_that_of_hanley_and_mcneil(
    good: int, bad: int, expected: float
) -> None:
    """Check an area of exactly 3/4: a quarter of the right answers score below every wrong one."""
    low = good // 4
    scores = [0.0] * low + [2.0] * (good - low) + [1.0] * bad
    found = auroc(scores, [True] * good + [False] * bad)
    assert found is not None
    area = found.mean
    q1, q2 = area / (2 - area), 2 * area**2 / (1 + area)
    variance = (area * (1 - area) + (good - 1) * (q1 - area**2) + (bad - 1) * (q2 - area**2)) / (
        good * bad
    )
    assert (found.high - found.low) / 2 == pytest.approx(1.959964 * math.sqrt(variance), rel=1e-6)
    assert math.sqrt(variance) == pytest.approx(expected, abs=0.004)


def test_an_area_of_clustered_answers_is_less_certain_than_of_as_many_prompts() -> None:
    generator = torch.Generator().manual_seed(4)
    scores, right, prompts = [], [], []
    for prompt in range(16):
        level, hit = torch.randn((), generator=generator).item(), prompt % 2 == 0
        scores += [level + 0.5 * hit] * 8
        right += [hit] * 8
        prompts += [str(prompt)] * 8
    plain, grouped = auroc(scores, right), clustered_auroc(scores, right, prompts, 0)
    assert plain is not None and grouped is not None
    assert grouped.high - grouped.low > 2 * (plain.high - plain.low)


def test_how_many_answers_a_gap_needs() -> None:
    assert rollouts_needed(0.5, 0.5) is None
    assert rollouts_needed(0.6, 0.5) == rollouts_needed(0.5, 0.6) == math.ceil(7.849 * 0.49 / 0.01)
    # The gaps that 64, 128 and 256 answers of each of two models can show around one half.
    assert [
        rollouts_needed(0.5 + gap / 2, 0.5 - gap / 2) for gap in (0.25, 0.175, 0.122)
    ] == pytest.approx([59, 125, 260], abs=2)
