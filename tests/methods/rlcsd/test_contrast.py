"""The contrast of two hints moves an advantage, and never turns it around."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.methods.rlcsd.contrast import contrast

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


@pytest.mark.parametrize("wrong", [{"scale": 0.0}, {"width": -1.0}, {"least": -0.1}])
def test_a_parameter_out_of_range_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="contrast needs scale and width above 0"):
        move(1.0, 1.0, **wrong)
