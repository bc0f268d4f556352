"""Every long wait is shown: its name, its progress, and the remaining time."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from toy import toy_recipe, toy_run

import practicum
from practicum.core.notes import hide_notes
from practicum.core.waits import Wait, display_waits, show_wait
from practicum.runs import console as consoles
from practicum.runs.console import JsonConsole, LiveConsole, PlainConsole
from practicum.runs.progress import show_progress
from practicum.studies.doctor import doctor
from practicum.studies.doctor.checks import CHECKS


class Clock:
    """A clock that moves on request."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace the clock of consoles and waits."""
    clock = Clock()
    monkeypatch.setattr("time.monotonic", clock.monotonic)
    return clock


@pytest.fixture
def seen() -> Iterator[list[str]]:
    """Collect the paths of the waits that ended, with their progress."""
    ended: list[str] = []

    def display(wait: Wait) -> None:
        if wait.is_over:
            ended.append(f"{wait.path} {wait.progress}/{wait.total}")

    with display_waits(display):
        yield ended


def test_waits_nest_and_count(seen: list[str]) -> None:
    with show_wait("evaluating"), show_wait("answers", 3) as wait:
        wait.advance()
        wait.move_to(3)
    assert seen == ["evaluating: answers 3/3", "evaluating 0/None"]


def test_a_wait_without_a_display_costs_nothing() -> None:
    with display_waits(None), show_wait("answers", 3) as wait:
        wait.advance()


def test_a_plain_console_writes_a_line_after_silence_and_then_less_often(clock: Clock) -> None:
    stream = io.StringIO()
    with (
        display_waits(PlainConsole(stream).wait),
        show_wait("evaluating"),
        show_wait("answers", 100) as wait,
    ):
        for clock.now in range(1, 100):
            wait.advance()
    assert stream.getvalue().splitlines() == [
        "evaluating: answers 10/100 | 0:10, 1:30 left",
        "evaluating: answers 30/100 | 0:30, 1:10 left",
        "evaluating: answers 70/100 | 1:10, 0:30 left",
    ]


def test_a_line_of_the_console_ends_the_silence(clock: Clock) -> None:
    stream = io.StringIO()
    console = PlainConsole(stream)
    with display_waits(console.wait), show_wait("loading") as wait:
        clock.now = 9.0
        console.event("a note")
        clock.now = 18.0
        wait.advance()
    assert stream.getvalue() == "a note\n"


def test_a_program_reads_waits_as_events(clock: Clock) -> None:
    stream = io.StringIO()
    with display_waits(JsonConsole(stream).wait), show_wait("answers", 4) as wait:
        clock.now = 12.0
        wait.advance()
    assert json.loads(stream.getvalue()) == {
        "event": "wait",
        "what": "answers",
        "done": 1,
        "total": 4,
    }


def test_a_terminal_shows_the_innermost_wait_and_then_nothing() -> None:
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    console = LiveConsole(stream)
    with display_waits(console.wait), show_wait("evaluating"), show_wait("answers", 4) as wait:
        wait.advance()
        console._live.refresh()
    console.close()
    assert "evaluating: answers 1/4 | 0:00" in stream.getvalue()
    assert not console._waits


def test_the_long_waits_of_a_run_show_themselves(
    models: Path, tmp_path: Path, seen: list[str]
) -> None:
    scratch = {"hidden_size": 16, "layers": 1, "heads": 2, "pretrain": {"steps": 2}}
    with hide_notes():
        toy_run(
            models,
            tmp_path,
            {"evaluation.prompts": 4, "train.steps": 1, "student": {"model": scratch}},
        )
    before = "evaluating 4 held-out prompts before training"
    for path in (
        "pretraining from scratch: steps 2/2",
        f"loading {models / 'teacher'} 0/None",
        f"{before}: answers 4/4",
        f"{before}: rewards 4/4",
        f"{before}: comparisons with the teacher 4/4",
        f"{before} 0/None",
        "evaluating the teacher in its own context: answers 4/4",
        "evaluating 4 held-out prompts after training: answers 4/4",
        "answers 8/8",
    ):
        assert path in seen, path


def test_the_checks_of_the_doctor_show_themselves(models: Path, seen: list[str]) -> None:
    with hide_notes():
        doctor(toy_recipe(models), prompts=2, samples=1)
    assert f"checks {len(CHECKS)}/{len(CHECKS)}" in seen and "answers 2/2" in seen


def test_python_shows_progress_unless_it_is_switched_off(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = toy_recipe(models, {"train.steps": 1})
    practicum.run(recipe, out=tmp_path / "shown")
    assert "step 1/1 | KL" in capsys.readouterr().out
    practicum.run(recipe, out=tmp_path / "hidden", progress=False)
    assert capsys.readouterr() == ("", "")


def test_progress_of_an_inner_block_belongs_to_the_outer_one(notes: list[str]) -> None:
    with show_progress() as inner:
        assert type(inner) is consoles.SilentConsole
    assert notes == []
