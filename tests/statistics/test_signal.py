"""Numbers of a teacher's signal, by hand and by law."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.statistics import (
    concentration,
    has_low_divergence_run,
    importance_health,
    participation_ratio,
    probability_error,
    quantiles,
)

POSITIVE = st.lists(st.floats(0.001, 100), min_size=1, max_size=30)


def test_half_of_it_is_on_one_token_of_four() -> None:
    divergence = torch.tensor([0.1, 10.0, 0.2, 0.3])
    assert concentration(divergence) == 0.25 and concentration(divergence, 0.99) == 0.75
    assert concentration(torch.ones(10)) == 0.5
    assert concentration(torch.zeros(3)) is None and concentration(torch.zeros(0)) is None


@given(POSITIVE, st.floats(0.05, 1.0))
def test_no_smaller_share_of_tokens_holds_as_much(values: list[float], share: float) -> None:
    found = concentration(torch.tensor(values), share)
    assert found is not None
    count = round(found * len(values))
    ordered = sorted(values, reverse=True)
    assert sum(ordered[:count]) >= share * sum(values) * (1 - 1e-6)
    assert sum(ordered[: count - 1]) < share * sum(values) * (1 + 1e-6)


@given(POSITIVE)
def test_between_one_token_and_all_take_part(values: list[float]) -> None:
    found = participation_ratio(torch.tensor(values))
    assert found is not None and 1 / len(values) - 1e-6 <= found <= 1 + 1e-6


def test_participation_by_hand() -> None:
    assert participation_ratio(torch.tensor([1.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
    assert participation_ratio(torch.ones(4)) == pytest.approx(1.0)
    assert participation_ratio(torch.zeros(4)) is None


def test_a_trap_is_four_quiet_windows_in_a_row() -> None:
    quiet, loud = torch.zeros(64), torch.ones(64)
    assert has_low_divergence_run(torch.cat([loud, *[quiet] * 4, loud]), 0.1)
    assert not has_low_divergence_run(torch.cat([*[quiet] * 3, loud, *[quiet] * 3]), 0.1)
    assert not has_low_divergence_run(torch.cat([*[quiet] * 3, quiet[:63]]), 0.1), (
        "a window that is not full does not count"
    )
    assert not has_low_divergence_run(torch.zeros(0), 0.1)
    assert has_low_divergence_run(torch.zeros(8), 0.1, window=2, windows=4)


def test_two_engines_that_agree_have_an_error_of_one() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5])
    assert probability_error(logprobs, logprobs) == 1.0
    shifted = logprobs + torch.log(torch.tensor([1.1, 1 / 1.1, 1.0]))
    assert probability_error(shifted, logprobs) == pytest.approx((1.1 + 1.1 + 1.0) / 3, rel=1e-6)
    assert probability_error(logprobs, shifted) == pytest.approx(
        probability_error(shifted, logprobs)
    )


def test_importance_weights_in_four_numbers() -> None:
    sampler = torch.zeros(4)
    learner = torch.log(torch.tensor([2.0, 1.0, 1.0, 0.0001]))
    found = importance_health(learner, sampler)
    mean, square = 4.0001 / 4, (4 + 1 + 1 + 1e-8) / 4
    assert found.mean == pytest.approx(mean, rel=1e-5) and found.largest == pytest.approx(2.0)
    assert found.chi_squared == pytest.approx(square - 1, rel=1e-5)
    assert found.effective_share == pytest.approx(mean**2 / square, rel=1e-5)


def test_weights_of_one_are_healthy_and_one_token_is_never_infinite() -> None:
    same = importance_health(torch.zeros(3), torch.zeros(3))
    assert (same.mean, same.effective_share, same.chi_squared) == (1.0, 1.0, 0.0)
    assert importance_health(torch.zeros(1), torch.tensor([-1e9])).largest < 1e9


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=20), st.floats(0, 1))
def test_a_quantile_is_one_of_the_values_with_as_many_below(
    values: list[float], share: float
) -> None:
    found = quantiles(torch.tensor(values, dtype=torch.float64), [share])[0]
    assert found in values
    assert abs(sum(v < found for v in values) - share * (len(values) - 1)) <= 0.5 + values.count(
        found
    )


def test_quantiles_at_the_ends_are_the_least_and_the_largest() -> None:
    assert quantiles(torch.tensor([3.0, 1.0, 2.0]), (0.0, 0.5, 1.0)) == [1.0, 2.0, 3.0]
