"""Numbers that change from step to step."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import assert_same_run, forked, rows, toy_data, toy_recipe, toy_run

from practicum.errors import NumericError, RecipeError
from practicum.recipe import parse_recipe, resolve_recipe
from practicum.recipe.schedule import (
    Adaptive,
    Cosine,
    First,
    Linear,
    ScheduleState,
    Staircase,
    Switch,
    compute_value,
)

NO_MODELS = Path("models")


def test_by_hand() -> None:
    assert [compute_value(Linear(start=1, end=0), step, 5) for step in range(1, 6)] == [
        1.0,
        0.75,
        0.5,
        0.25,
        0.0,
    ]
    assert [
        compute_value(Linear(start=0, end=2, steps=3), step, 9) for step in (1, 2, 3, 4, 9)
    ] == [0, 1, 2, 2, 2]
    assert compute_value(Cosine(start=2, end=0), 3, 5) == pytest.approx(1.0)
    assert [compute_value(Switch(before=1, after=0, at=2), step, 9) for step in (1, 2, 3)] == [
        1,
        1,
        0,
    ]
    assert compute_value(Adaptive(start=0.4, end=1), 7, 9) == 0.4


@given(st.floats(-5, 5), st.floats(-5, 5), st.integers(1, 50), st.integers(1, 60))
def test_planned_numbers_stay_between_their_ends(
    start: float, end: float, steps: int, step: int
) -> None:
    for schedule in (
        Linear(start=start, end=end),
        Cosine(start=start, end=end),
        Linear(start=start, end=end, steps=7),
    ):
        value = compute_value(schedule, step, steps)
        assert min(start, end) - 1e-9 <= value <= max(start, end) + 1e-9
        assert compute_value(schedule, 1, steps) == start


def test_a_schedule_stands_where_the_number_stands_whichever_way_it_is_written() -> None:
    recipe = toy_recipe(
        NO_MODELS,
        {
            "objective": {
                "target": "log_linear(teacher=1, student=linear(0.5, 0))",
                "divergence": {"type": "jsd", "beta": "linear(0.1, 0.9, steps=4)"},
                "coefficient": "cosine(1, 0.5)",
            },
            "rollout.max_new_tokens": "linear(4, 16)",
            "optimizer.learning_rate": "switch(0.01, 0.001, at=2)",
        },
    )
    assert set(recipe.schedules) == {
        "objective.losses.0.target.student",
        "objective.losses.0.divergence.beta",
        "objective.losses.0.coefficient",
        "rollout.max_new_tokens",
        "optimizer.learning_rate",
    }
    first, last = (
        recipe.replace_numbers(ScheduleState(recipe.schedules, 4).compute_numbers(step))
        for step in (1, 4)
    )
    assert first.objective == recipe.objective
    assert (first.rollout.max_new_tokens, last.rollout.max_new_tokens, recipe.longest_answer) == (
        4,
        16,
        16,
    )
    assert (first.optimizer.learning_rate, last.optimizer.learning_rate) == (0.01, 0.001)
    (term,) = last.objective.losses
    assert str(term.target.model_dump()) == "log_linear(teacher=1.0, student=0.0, reference=0.0)"
    assert (term.divergence.arguments, term.coefficient) == ({"beta": 0.9}, 0.5)
    assert parse_recipe(resolve_recipe(recipe), "again") == recipe


WRONG = [
    (
        {"objective": {"divergence": "jsd(linear(0.1, 0.9))"}},
        r"divergence: name the argument that linear\(0.1, 0.9\)",
    ),
    ({"objective": {"divergence": "jsd(beta=linear(0.1, 1))"}}, r"jsd: beta must be in \(0, 1\)"),
    (
        {"objective": {"coefficient": "linear(a, 1)"}},
        r"linear\(a, 1\) needs a number to begin with",
    ),
    (
        {"objective": {"coefficient": "linear(1)"}},
        r"schedules.objective.losses.0.coefficient.linear.end: missing",
    ),
    (
        {"objective": {"coefficient": "linear(1, 2, speed=3)"}},
        r"schedule 'linear' has no parameter 'speed'",
    ),
    (
        {"schedules": {"objective.losses.3.coefficient": "linear(1, 0)"}},
        "there is no number at 'objective.losses.3.coeff",
    ),
    (
        {"schedules": {"rollout.n": "wavy(1, 0)"}},
        "no schedule named 'wavy'; known: linear, cosine, switch, adaptive, staircase, first",
    ),
    (
        {"objective": {"coefficient": "staircase(1, 0)"}},
        r"objective.losses.0.coefficient needs evaluations .*; set evaluation.every: 1 and "
        "evaluation.prompts: 64",
    ),
    ({"rollout.max_new_tokens": "linear(4, -1)"}, "max_new_tokens.*greater than or equal to 1"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=str)
def test_what_cannot_be_right_is_named_before_the_run(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        parse_recipe(toy_data(NO_MODELS, changes), "toy")


def test_an_adaptive_number_follows_the_metric_by_taids_rule() -> None:
    courses = ScheduleState({"x": Adaptive(start=0.4, end=1.0, rate=0.1, momentum=0.5)}, 10)
    value, momentum, previous = 0.4, 0.0, 2.0
    courses.update({"loss": previous})
    assert courses.compute_numbers(2) == {"x": 0.4}
    for loss in (1.5, 1.4, 1.6):
        courses.update({"loss": loss})
        momentum = 0.5 * momentum + 0.5 * (previous - loss) / (previous + 1e-12)
        value += 0.1 / (1 + math.exp(-momentum)) * (1.0 - value)
        previous = loss
        assert courses.compute_numbers(3)["x"] == pytest.approx(value, rel=1e-12)
    again = ScheduleState({"x": Adaptive(start=0.4, end=1.0, rate=0.1, momentum=0.5)}, 10)
    again.load_state(courses.save_state())
    assert again.compute_numbers(4) == courses.compute_numbers(4)


def test_a_staircase_rises_when_the_heldout_metric_stops_falling() -> None:
    """As released for DistiLLM: by 0.1 whenever the loss is not below that of the last rise, plus a tolerance."""
    courses = ScheduleState({"x": Staircase(start=0.0, end=0.25, tolerance=-0.1)}, 10)
    heights = []
    for loss in (2.0, None, 1.5, 1.95, None, 1.8, 1.86, 3.0, 9.0):
        courses.update({"loss": 0.0} if loss is None else {"heldout_reverse_kl": loss})
        heights.append(round(courses.compute_numbers(2)["x"], 9))
    assert heights == [0.0, 0.0, 0.0, 0.1, 0.1, 0.1, 0.2, 0.25, 0.25]
    falling = ScheduleState({"x": Staircase(start=1.0, end=0.0, by=0.7)}, 10)
    for _ in range(3):
        falling.update({"heldout_reverse_kl": 1.0})
    assert falling.compute_numbers(2)["x"] == 0.0
    with pytest.raises(NumericError, match="x adapts to the metric 'heldout_typo'"):
        ScheduleState({"x": Staircase(start=0.0, end=1.0, metric="heldout_typo")}, 10).update(
            {"heldout_reverse_kl": 1.0}
        )


def test_a_first_measurement_stays_also_after_a_resume() -> None:
    courses = ScheduleState({"x": First(start=0.5, metric="gap")}, 10)
    assert courses.compute_numbers(1) == {"x": 0.5}
    courses.update({"nonfinite": 1.0})
    assert courses.compute_numbers(2) == {"x": 0.5}
    for gap in (0.2, 0.7):
        courses.update({"gap": gap})
        assert courses.compute_numbers(3) == {"x": 0.2}
    again = ScheduleState({"x": First(start=0.5, metric="gap")}, 10)
    again.load_state(courses.save_state())
    again.update({"gap": 0.9})
    assert again.compute_numbers(4) == {"x": 0.2}


@pytest.mark.parametrize(
    "schedule",
    [
        First(start=0.5, metric="gap"),
        Adaptive(start=0.0, end=1.0, metric="gap"),
        Staircase(start=0.0, end=1.0, metric="gap"),
    ],
)
def test_a_step_without_a_metric_that_was_measured_before_moves_nothing(schedule: Any) -> None:
    courses = ScheduleState({"x": schedule}, 10)
    with pytest.raises(NumericError, match="x adapts to the metric 'gap'"):
        courses.update({"loss": 1.0})
    for _ in range(2):
        courses.update({"gap": 0.2})
    before = courses.save_state()
    courses.update({"loss": 1.0})
    assert courses.save_state() == before


def test_a_metric_that_nobody_measures_is_named() -> None:
    courses = ScheduleState({"x": Adaptive(start=0.0, end=1.0, metric="validation")}, 10)
    with pytest.raises(
        NumericError, match=r"x adapts to the metric 'validation', .* it measures: length, loss"
    ):
        courses.update({"loss": 1.0, "length": 2.0})
    courses.update({"nonfinite": 1.0})


@pytest.mark.long
def test_a_run_with_schedules_resumes_where_its_numbers_were(models: Path, tmp_path: Path) -> None:
    changes = {
        "objective": {"target": "log_linear(teacher=1, student=adaptive(0.5, 0, rate=0.9))"},
        "rollout.max_new_tokens": "linear(2, 5)",
        "optimizer.learning_rate": "cosine(0.01, 0.001)",
        "train.steps": 6,
    }
    whole = toy_run(models, tmp_path / "whole", changes).folder
    killed = forked(
        lambda: toy_run(models, tmp_path / "cut", changes), env={"PRACTICUM_FAULT": "update:5"}
    )
    assert killed == 137
    assert_same_run(whole, toy_run(models, tmp_path / "cut", changes, resume=True).folder)
    metrics = rows(whole / "metrics.jsonl")
    assert [row["learning_rate"] for row in metrics][::5] == [0.01, 0.001]
    assert metrics[0]["length"] <= 2 < metrics[-1]["length"] <= 5
