"""A chat with a run on a task with tools."""

import io
import sys
from pathlib import Path

import pytest
import torch

from practicum.cli.after import _print_turns, hold_chat
from practicum.errors import RecipeError
from practicum.recipe import load_recipe
from practicum.rollouts.conversation import Conversation
from practicum.runs import run
from practicum.types import CallRecord, Sample, Turn

CHANGES = [
    *("student.model.hidden_size=16", "student.model.layers=1", "student.model.heads=2"),
    *("train.steps=1", "train.prompts_per_step=2", "evaluation.prompts=0"),
    "rollout.max_new_tokens=24",
]


def test_a_chat_offers_the_tools_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(run(load_recipe("smoke/tools", CHANGES), out=tmp_path).folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO("3+4\n\nnever read\n"))
    hold_chat(folder, 0.0, 12, None, teacher=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("student: ") and all("never" not in line for line in lines)
    with pytest.raises(RecipeError, match=r"the task has tools, .*; leave --teacher out"):
        hold_chat(folder, 0.0, 12, None, teacher=True)


def test_calls_and_a_bad_end_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    none = torch.zeros(0)
    turns = (
        Turn(
            "assistant",
            0,
            "[calc(x=\x1b)]",
            (CallRecord("calc", "invalid"), CallRecord("", "unreadable")),
        ),
        Turn("tool", 0, "error: x is no a+b"),
    )
    _print_turns(Conversation(Sample(none.long(), none, none, "turns"), none.bool(), turns, {}))
    assert capsys.readouterr().out.splitlines() == [
        "student: [calc(x=\\x1b)]",
        "  (calc: invalid)",
        "  (a call: unreadable)",
        "tool: error: x is no a+b",
        "(ended: turns)",
    ]
