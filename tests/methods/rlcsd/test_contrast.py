"""The contrast of hints moves an advantage and never turns it around; moved tokens have a mean of their own."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.functional.weights import TokenStatistics
from practicum.methods.rlcsd.contrast import contrast, two_means

NUMBERS = st.floats(-3.0, 3.0)


def move(advantage: float, log_ratio: float, **parameters: float) -> float:
    values = torch.tensor([advantage]), torch.tensor([log_ratio])
    return contrast.function(torch.zeros(1), *values, **parameters).item()


@given(advantage=NUMBERS, log_ratio=NUMBERS, scale=st.floats(0.1, 2.0), width=st.floats(0.01, 1.0))
def test_the_sign_stays_and_the_size_changes_by_at_most_the_scale(
    advantage: float, log_ratio: float, scale: float, width: float
) -> None:
    moved = move(advantage, log_ratio, scale=scale, width=width)
    assert moved * advantage >= 0.0
    assert abs(moved - advantage) <= scale * (1 + 1e-5) or moved == 0.0
    if advantage == 0.0:
        assert moved == 0.0


@given(advantage=NUMBERS, first=NUMBERS, second=NUMBERS)
def test_a_better_right_hint_never_lowers_the_advantage(
    advantage: float, first: float, second: float
) -> None:
    low, high = sorted((first, second))
    assert move(advantage, low, least=0.0) <= move(advantage, high, least=0.0)


@given(advantage=NUMBERS, size=st.floats(0.0, 0.0199))
def test_small_changes_are_left_out(advantage: float, size: float) -> None:
    log_ratio = 0.02 * math.atanh(size / 0.5)
    assert move(advantage, log_ratio) == torch.tensor(advantage).item()
    assert move(2.0, 1.0) == pytest.approx(2.5) and move(-2.0, 1.0) == pytest.approx(-1.5)


TOKENS = st.lists(
    st.tuples(st.booleans(), st.sampled_from([-0.1, -1e-4, 0.0, 5e-4, 0.02]), NUMBERS), max_size=9
)


@given(tokens=TOKENS, eta=st.floats(0.0, 3.0))
def test_the_weighted_mean_is_a_mean_of_the_unmoved_tokens_and_a_mean_of_the_moved_tokens(
    tokens: list[tuple[bool, float, float]], eta: float
) -> None:
    mask, gaps, losses = (
        (list(column) for column in zip(*tokens, strict=True)) if tokens else ([],) * 3
    )
    student = torch.full((len(tokens),), -1.0)
    statistics = TokenStatistics(
        loss_mask=torch.tensor(mask, dtype=torch.bool),
        logprobs=student,
        teacher_logprobs=student + torch.tensor(gaps),
    )
    weights = two_means.function(statistics, eta=eta).tolist()
    scored = [
        (abs(move(1.0, gap) - 1.0) > 0, loss)
        for is_scored, gap, loss in zip(mask, gaps, losses, strict=True)
        if is_scored
    ]
    means = {
        is_moved: sum(loss for has_moved, loss in scored if has_moved == is_moved)
        / max(sum(has_moved == is_moved for has_moved, _ in scored), 1)
        for is_moved in (True, False)
    }
    weighted = sum(weight * loss for weight, loss in zip(weights, losses, strict=True))
    expected = len(scored) * (means[False] + eta * means[True])
    assert weighted == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert all(
        weight == 0.0 for weight, is_scored in zip(weights, mask, strict=True) if not is_scored
    )


def test_a_negative_share_of_the_moved_tokens_is_refused() -> None:
    empty = TokenStatistics(loss_mask=torch.zeros(0))
    with pytest.raises(ValueError, match="two_means needs eta from 0 on"):
        two_means.function(empty, eta=-1.0)


@pytest.mark.parametrize("wrong", [{"scale": 0.0}, {"width": -1.0}, {"least": -0.1}])
def test_a_parameter_out_of_range_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="contrast needs scale and width above 0"):
        move(1.0, 1.0, **wrong)
