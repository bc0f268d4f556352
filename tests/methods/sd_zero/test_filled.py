"""A note that is chosen by the verdict."""

from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from practicum.methods.sd_zero import filled
from practicum.ports import TaskContext
from practicum.ports.notes import NoteContext, NoteMoment
from practicum.tasks.user import Config, UserTask, build
from practicum.types import Rollout

ROWS = {"type": "reverse", "alphabet": "abcd", "train_size": 4, "heldout_size": 2}


def open_task(**settings: object) -> UserTask:
    task = build(Config(**{"task": ROWS, **settings}), TaskContext(seed=0, base_dir=Path()))  # type: ignore[arg-type]
    assert isinstance(task, UserTask) and task.opens_episodes
    return task


def test_a_filled_note_is_chosen_by_the_verdict() -> None:
    task = open_task()
    prompt = task.train_prompts()[0]
    config = filled.Config(correct="so: {attempt}", incorrect="not {attempt} {missing}")
    note = filled.build(config, NoteContext("n", None, task, 0))  # type: ignore[arg-type]
    rollouts = [
        replace(Rollout.from_text(prompt, "{answer}"), reward=reward, notes=notes)
        for reward, notes in ((1.0, {}), (0.0, {}), (0.0, {"missing": "x"}), (None, {}))
    ]
    assert note.write(rollouts, NoteMoment(1, None)) == [  # type: ignore[arg-type]
        "so: {answer}",
        None,
        "not {answer} x",
        None,
    ]
    with pytest.raises(ValidationError, match="write correct, incorrect or both"):
        filled.Config()
