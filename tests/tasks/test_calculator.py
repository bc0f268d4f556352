"""The task `calculator`: its tool, its expert, and whole runs."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from toy import assert_same_run, rows

from practicum.ports import TaskContext
from practicum.ports.tasks import (
    ToolProblem,
)
from practicum.recipe import load_recipe
from practicum.runs import run
from practicum.tasks.calculator import Config, build, compute
from practicum.types import Rollout

CHANGES = [
    "student.model.hidden_size=16",
    "student.model.layers=1",
    "student.model.heads=2",
    "train.steps=2",
    "train.prompts_per_step=4",
    "evaluation.prompts=2",
    "task.train_size=8",
    "task.heldout_size=2",
    "rollout.max_new_tokens=48",
    "monitors.M4.action=off",
    "teacher.softness=0.0001",
    "rollout.source=mix(student=0.5, other=teacher)",
]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("37*48", 1776),
        ("3-9", -6),
        ("3+4", 7),
        ("3**4", None),
        ("3/4", None),
        ("1e9*2", None),
        ("9" * 10 + "*1", None),
    ],
)
def test_two_numbers_are_worked_out_and_nothing_else_is(text: str, value: int | None) -> None:
    assert compute(text) == value


def test_the_tool_refuses_what_is_no_expression(tmp_path: Path) -> None:
    task = build(Config(train_size=4, heldout_size=1), TaskContext(0, tmp_path))
    assert task.toolbox is not None and task.has_expert
    tool = task.toolbox.open(task.train_prompts()[0], 0)
    assert tool.call("calc", {"x": "6*7"}) == "42"
    for arguments in ({}, {"x": 3}, {"x": "a"}, {"x": "6*7", "y": 1}):
        with pytest.raises(ToolProblem, match=r"x is no a\+b"):
            tool.call("calc", arguments)


def test_the_expert_calls_and_then_answers(tmp_path: Path) -> None:
    task = build(Config(train_size=4, heldout_size=1), TaskContext(0, tmp_path))
    prompt = task.train_prompts()[0]
    (call,) = task.expert(prompt, ())
    (answer,) = task.expert(prompt, (call,))
    assert call == f'[calc(x="{prompt.messages[0].content}")]'
    assert task.reward(Rollout.from_text(prompt, call, answer)) == 1
    assert task.reward(Rollout.from_text(prompt, answer, call)) == 0


def test_an_answer_in_whatever_form_is_right_and_its_form_is_counted(tmp_path: Path) -> None:
    config = Config(train_size=4, heldout_size=1, tags=("<", ">"), sloppy=0.5)
    task = build(config, TaskContext(0, tmp_path))
    assert task.has_expert
    prompt = task.train_prompts()[0]
    (call,) = task.expert(prompt, ())
    value = str(prompt.answer)
    stated = f"<{value}>"
    assert task.expert(prompt, (call,)) == {stated: 0.5, value: 0.25, 2 * stated: 0.25}
    for answer, right, count in [
        (stated, 1, 1),
        (value, 1, 0),
        (2 * stated, 1, 2),
        (f"<0.5>{stated}", 1, 2),
        (f"{stated}<0.5>", 0, 2),
        (f"{stated}>", 1, 0),
        (f"<{value}", 0, 0),
    ]:
        rollout = Rollout.from_text(prompt, call, answer)
        assert (task.reward(rollout), task.count_answers(rollout)) == (right, count), answer
    # An answer counts at any position: here before the call as well.
    assert task.count_answers(Rollout.from_text(prompt, stated, call, stated)) == 2
    plain = build(Config(train_size=4, heldout_size=1), TaskContext(0, tmp_path))
    assert plain.count_answers(rollout) is None


def test_tags_are_checked() -> None:
    with pytest.raises(ValidationError, match="write tags"):
        Config(sloppy=0.5)
    for tags in (("<", "<"), ("<", "<<"), ("", ">")):
        with pytest.raises(ValidationError, match="do not contain each other"):
            Config(tags=tags)


def test_sizes_and_operators_are_checked() -> None:
    with pytest.raises(ValidationError, match="ask for 576 expressions, but there are only 243"):
        Config(digits=1)
    with pytest.raises(ValidationError, match="repeats one"):
        Config(operators="++")


def hold(out: Path, *changes: str, **options: Any) -> Path:
    return Path(run(load_recipe("smoke/tools", [*CHANGES, *changes]), out=out, **options).folder)


def test_a_run_calls_counts_and_resumes(tmp_path: Path) -> None:
    whole = hold(tmp_path / "whole", "train.checkpoint_every=1")
    recorded = rows(whole / "rollouts.jsonl")
    by_teacher = [row for row in recorded if row["source"] == "teacher"]
    assert by_teacher, "half of the conversations"
    for row in by_teacher:
        call, result, answer = row["turns"]
        assert call["calls"] == [{"tool": "calc", "outcome": "answered"}]
        assert result["role"] == "tool" and result["text"] == answer["text"]
        assert row["loss_mask"].count(False) == result["tokens"]
        assert row["reward"] == 1
    assert all({"turns", "failed"} <= set(row) for row in rows(whole / "metrics.jsonl"))
    assert "tools" in (whole / "recipe.json").read_text()
    hold(tmp_path / "half", "train.checkpoint_every=1", "train.steps=1")
    resumed = hold(
        tmp_path / "half", "train.checkpoint_every=1", resume=True, allow_changed=["train.steps"]
    )
    assert_same_run(whole, resumed)
