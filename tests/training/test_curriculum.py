"""Prompts by their pass rate: laws of the choice, earlier runs, and exact resumption."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from toy import assert_same_run, rows, toy_recipe, toy_run

from practicum.errors import CheckpointError, DataError, RecipeError
from practicum.recipe.sections import CurriculumConfig
from practicum.training.curriculum import Curriculum
from practicum.types import Message, Prompt

PROMPTS = [Prompt(f"p{number}", (Message("user", f"q{number}"),)) for number in range(6)]


def write(path: Path, rewards: Mapping[str, list[float | None]]) -> Path:
    """Write the rollouts of an earlier run with these rewards by prompt."""
    lines = [{"prompt": name, "reward": r} for name, group in rewards.items() for r in group]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path: Path, **settings: Any) -> Curriculum:
    """Return a curriculum by the rows of an earlier run."""
    curriculum = Curriculum(PROMPTS, is_live=False, **settings)
    curriculum.read_run(path)
    return curriculum


def names(prompts: list[Prompt]) -> list[str]:
    return [prompt.id for prompt in prompts]


def test_the_range_and_the_rise_choose_prompts_of_an_earlier_run(tmp_path: Path) -> None:
    rewards: dict[str, list[float | None]] = {
        "p0": [0.0, 0.0, 0.0, 0.0],
        "p1": [1.0, 1.0, 1.0, 1.0],
        "p2": [0.0, 0.0, 1.0, 1.0],
        "p3": [1.0, 0.0, 0.5, 1.0],  # half a point is not right
        "p4": [None],
        "elsewhere": [1.0],
    }
    path = write(tmp_path / "rows.jsonl", rewards)
    assert names(read(path, high=0.9).list_chosen()) == ["p0", "p2", "p3"]
    assert names(read(path, low=0.5).list_chosen()) == ["p1", "p2", "p3"]
    stalled = read(path, high=0.9, rise=0.1)
    assert names(stalled.list_chosen()) == ["p0", "p3"], "p2 rose, p1 is solved"
    # Each chosen prompt once per epoch, and nothing else.
    assert sorted(names(stalled.select(0, 1, 2))) == ["p0", "p3"]
    # The second half has the newer answers, so a prompt that is solved by now is left out.
    write(path, {"p2": [0.0, 1.0, 1.0]})
    solved = read(path, high=0.9, rise=1)
    assert not solved.list_chosen()
    assert sorted(names(solved.select(0, 1, 6))) == sorted(names(PROMPTS)), "all, if none"
    assert names(read(path, high=0.9).list_chosen()) == ["p2"]


@given(st.lists(st.integers(0, 8), min_size=6, max_size=6), st.integers(0, 99), st.integers(1, 20))
def test_a_draw_has_each_prompt_once_before_any_twice(
    right: list[int], seed: int, count: int
) -> None:
    curriculum = Curriculum(PROMPTS, powers=(1, 1))
    state = {f"p{n}": [True] * number + [False] * (8 - number) for n, number in enumerate(right)}
    curriculum.load_state(state)
    assert curriculum.save_state() == state
    chosen = names(curriculum.select(seed, 3, count))
    assert chosen == names(curriculum.select(seed, 3, count))
    counts = Counter(chosen)
    assert len(chosen) == count
    assert max(counts.values()) - min(counts.get(name, 0) for name in names(PROMPTS)) <= 1


def test_prompts_are_drawn_in_proportion_to_p_times_one_minus_p() -> None:
    curriculum = Curriculum(PROMPTS[:3], powers=(1, 1))
    # (2 + 1) / (4 + 2) = 1/2, 11/12, and 1/2 without an answer.
    curriculum.load_state({"p0": [True, True, False, False], "p1": [True] * 10})
    first = Counter(curriculum.select(0, step, 1)[0].id for step in range(1, 3001))
    rates = {"p0": 1 / 4, "p1": 11 / 144, "p2": 1 / 4}
    for name, rate in rates.items():
        assert first[name] / 3000 == pytest.approx(rate / sum(rates.values()), abs=0.03)


def test_bad_settings_and_bad_rows_are_refused(tmp_path: Path) -> None:
    for settings, match in (
        ({}, "it keeps every prompt; set pass_rate, rise or powers"),
        ({"pass_rate": [0.9, 0.1]}, "0.9 to 0.1 is no range"),
        ({"pass_rate": [0, 2]}, "less than or equal to 1"),
        # p**a of a rare success would be 0, and a rate of 0 has no waiting time.
        ({"powers": [1000, 0]}, "less than or equal to 10"),
    ):
        with pytest.raises(ValidationError, match=match):
            CurriculumConfig.model_validate(settings)
    path = write(tmp_path / "rows.jsonl", {"elsewhere": [1.0]})
    with pytest.raises(DataError, match="has no rewarded answer to a prompt of this run"):
        read(path)
    path.write_text('{"prompt": "p0", "reward": 1.0}\n{"prompt": 3}\n')
    with pytest.raises(DataError, match="row 2 is not a rollout"):
        read(path)
    with pytest.raises(DataError, match=r"train\.curriculum\.run: no file .*nowhere"):
        read(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="other prompts"):
        Curriculum(PROMPTS).load_state({"x": []})


@pytest.mark.long
def test_a_curriculum_of_this_run_acts_and_resumes_exactly(models: Path, tmp_path: Path) -> None:
    changes = {
        "train.steps": 6,
        "train.checkpoint_every": 3,
        "train.prompts_per_step": 6,
        "train.curriculum": {"powers": [1, 1]},
        "rollout.n": 4,
    }
    whole = toy_run(models, tmp_path / "whole", changes).folder
    assert rows(whole / "metrics.jsonl")[0]["curriculum/prompts"] == 48
    plain = toy_run(models, tmp_path / "plain", changes | {"train.curriculum": None}).folder
    asked = [
        [row["prompt"] for row in rows(folder / "rollouts.jsonl")] for folder in (whole, plain)
    ]
    assert asked[0] != asked[1]
    cut = toy_run(models, tmp_path / "cut", changes | {"train.steps": 3})
    state = json.loads((cut.folder / "checkpoints" / "step-3" / "state.json").read_text())
    assert 0 < len(state["curriculum"]) <= 18
    resumed = toy_run(
        models, tmp_path / "cut", changes, resume=True, allow_changed=["train.steps"]
    ).folder
    assert_same_run(whole, resumed)


def test_a_sampler_that_runs_ahead_cannot_choose_by_the_newest_answers(models: Path) -> None:
    changes = {"rollout.max_staleness": 2, "train.curriculum": {"powers": [1, 1]}}
    with pytest.raises(RecipeError, match=r"max_staleness is 2, and train\.curriculum chooses"):
        toy_recipe(models, changes)
