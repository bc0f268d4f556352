"""The teacher's summed entropy ends the part of each completion that counts."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.functional.weights import TokenStatistics
from practicum.methods.og_opsd.prefix import entropy_prefix

COMPLETIONS = st.lists(
    st.lists(st.tuples(st.booleans(), st.integers(0, 8)), min_size=1, max_size=6), max_size=4
)
"""Supervised or not, and the entropy in eighths, so that sums are exact."""
BUDGETS = st.integers(1, 30).map(lambda eighths: eighths / 8)


def mark(completions: list[list[tuple[bool, int]]], budget: float) -> list[list[float]]:
    tokens = [token for completion in completions for token in completion]
    rows = [number for number, completion in enumerate(completions) for _ in completion]
    statistics = TokenStatistics(
        loss_mask=torch.tensor([is_scored for is_scored, _ in tokens], dtype=torch.bool),
        teacher_entropy=torch.tensor([eighths / 8 for _, eighths in tokens]),
        rows=torch.tensor(rows, dtype=torch.long),
    )
    marks = entropy_prefix.function(statistics, budget=budget)
    return [part.tolist() for part in marks.split([len(part) for part in completions])]


@given(completions=COMPLETIONS, budget=BUDGETS)
def test_the_marks_are_those_of_a_loop(
    completions: list[list[tuple[bool, int]]], budget: float
) -> None:
    expected = []
    for completion in completions:
        spent, marks = 0.0, []
        for is_scored, eighths in completion:
            marks.append(float(is_scored and spent < budget))
            spent += eighths / 8 if is_scored else 0.0
        expected.append(marks)
    assert mark(completions, budget) == expected


@given(completions=COMPLETIONS, budget=BUDGETS, more=BUDGETS)
def test_a_larger_budget_marks_a_longer_prefix(
    completions: list[list[tuple[bool, int]]], budget: float, more: float
) -> None:
    for tokens, short, long in zip(
        completions, mark(completions, budget), mark(completions, budget + more), strict=True
    ):
        short, long = (
            [weight for (is_scored, _), weight in zip(tokens, marks, strict=True) if is_scored]
            for marks in (short, long)
        )
        assert short == sorted(short, reverse=True) and sum(short) <= sum(long)
        assert not short or short[0] == 1.0


@given(completions=COMPLETIONS)
def test_without_a_limit_every_supervised_token_is_marked(
    completions: list[list[tuple[bool, int]]],
) -> None:
    scored = [[float(is_scored) for is_scored, _ in tokens] for tokens in completions]
    assert mark(completions, math.inf) == scored


def test_an_entropy_outside_the_mask_may_be_infinite() -> None:
    statistics = TokenStatistics(
        loss_mask=torch.tensor([False, True, True]),
        teacher_entropy=torch.tensor([math.inf, 1.0, 1.0]),
        rows=torch.tensor([0, 0, 1]),
    )
    assert entropy_prefix.function(statistics).tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("budget", [0.0, -1.0, math.nan])
def test_a_budget_that_is_not_positive_is_refused(budget: float) -> None:
    with pytest.raises(ValueError, match="entropy_prefix: budget must be positive"):
        entropy_prefix.function(TokenStatistics(loss_mask=torch.zeros(0)), budget=budget)
