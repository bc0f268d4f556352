"""A note that is selected by the verdict."""

from dataclasses import replace

import pytest
from pydantic import ValidationError

from practicum.methods.sd_zero import filled
from practicum.ports.notes import NoteContext, NoteMoment
from practicum.types import Rollout
from tests.tasks.test_user import open_task


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
    with pytest.raises(ValidationError, match="set correct, incorrect or both"):
        filled.Config()
