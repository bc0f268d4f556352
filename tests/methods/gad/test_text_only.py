"""A teacher that only gives text: no scores, the answers and the state of the teacher inside."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from toy import curve, rows, toy_recipe, toy_run

from practicum.errors import CapabilityError
from practicum.runs.plan import plan


def build_changes(models: Path, only: bool, inner: Any = None) -> dict[str, Any]:
    inner = inner or {"type": "model", "model": str(models / "teacher")}
    return {
        "teacher": {"type": "text_only", "teacher": inner} if only else inner,
        "objective": {"signal": "text", "divergence": "ce"},
        "rollout": {"source": "teacher", "max_new_tokens": 5},
        "train.steps": 2,
    }


def test_its_text_is_that_of_the_teacher_inside(models: Path, tmp_path: Path) -> None:
    whole, text = (
        toy_run(models, tmp_path / str(only), build_changes(models, only)).folder
        for only in (False, True)
    )
    assert [re.sub(r"<\w+>", "", row["text"]) for row in rows(whole / "rollouts.jsonl")[:8]] == [
        row["text"] for row in rows(text / "rollouts.jsonl")[:8]
    ]
    assert all(math.isfinite(loss) for loss in curve(text, "loss"))


def test_it_scores_nothing(models: Path, tmp_path: Path) -> None:
    changes = build_changes(models, True) | {"objective": {"signal": "full"}}
    with pytest.raises(CapabilityError, match=r"only writes.*papers/seqkd"):
        toy_run(models, tmp_path, changes)


def test_worked_examples_can_be_all_that_it_has(models: Path, tmp_path: Path) -> None:
    """Check the student's own weights with examples in view, as a teacher that only writes."""
    inner = {
        "type": "privileged",
        "teacher": {"type": "self", "weights": "ema"},
        "demonstrations": [{"prompt": "ab", "answer": "ba"}],
    }
    folder = toy_run(models, tmp_path, build_changes(models, True, inner)).folder
    assert all(row["text"] is not None for row in rows(folder / "rollouts.jsonl"))


def test_one_that_writes_nothing_is_refused(models: Path, tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match="writes no answers"):
        toy_run(models, tmp_path, build_changes(models, True, {"type": "none"}))


def test_it_can_be_planned(models: Path) -> None:
    metrics = plan(toy_recipe(models, build_changes(models, True))).run.metrics
    assert metrics["cost/teacher_tokens"] == 8 * 5
