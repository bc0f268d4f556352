"""A run as a session: the limits of observers, the resources it closes, and the destination of its notes."""

import logging
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from toy import RecordingConsole, assert_same_run, rows, toy_recipe, toy_run

from practicum.errors import ModelError, ResourceError
from practicum.run_dir import RunDir
from practicum.runs.assembly import assemble_run
from practicum.runs.console import SilentConsole
from practicum.runs.observers import FinishedStep, Observer
from practicum.runs.session import RunResult, Session
from practicum.runs.tracked import RunTracker

log = logging.getLogger("practicum.test")


def go(
    models: Path,
    out: Path,
    observers: Sequence[Observer] = (),
    *,
    resume: bool = False,
    **changes: Any,
) -> RunResult:
    """Run the toy recipe as a session with the given observers."""
    recipe = toy_recipe(models, changes)
    home = RunDir.open(out / "toy") if resume else RunDir.create(out, "toy")
    with home.lock(), RunTracker.open(recipe, home) as tracked, ExitStack() as at_end:
        session = Session(home, recipe, SilentConsole(), lambda: None, tracked, at_end, observers)
        return session.execute(resume=resume)


class Looks:
    """Looks at the folder after every step."""

    def __init__(self, folder: Path) -> None:
        self.seen: list[tuple[int, int, list[str]]] = []
        self._folder = folder

    def on_step(self, step: FinishedStep) -> None:
        saved = sorted(path.name for path in (self._folder / "checkpoints").glob("step-*"))
        self.seen.append((step.number, len(rows(self._folder / "metrics.jsonl")), saved))
        assert len(step.result.rollouts) == 8 and "reverse_kl" in step.metrics


class Fails:
    """Fails after a step."""

    def __init__(self, number: int) -> None:
        self._number = number

    def on_step(self, step: FinishedStep) -> None:
        if step.number == self._number:
            raise ResourceError("no more room for pictures")


def test_an_observer_sees_every_step_written_and_not_yet_saved(
    models: Path, finished: Path, tmp_path: Path
) -> None:
    looks = Looks(tmp_path / "toy")
    folder = go(models, tmp_path, [looks.on_step], **{"evaluation.prompts": 8}).folder
    assert looks.seen == [(1, 1, []), (2, 2, []), (3, 3, ["step-2"]), (4, 4, ["step-2"])]
    assert_same_run(finished, folder)


def test_the_step_of_an_observer_that_fails_is_done_again(
    models: Path, finished: Path, tmp_path: Path
) -> None:
    evaluated = {"evaluation.prompts": 8}
    with pytest.raises(ResourceError, match="no more room for pictures"):
        go(models, tmp_path, [Fails(4).on_step], **evaluated)
    assert [path.name for path in (tmp_path / "toy" / "checkpoints").glob("step-*")] == ["step-2"]
    looks = Looks(tmp_path / "toy")
    folder = go(models, tmp_path, [looks.on_step], resume=True, **evaluated).folder
    assert [number for number, _, _ in looks.seen] == [3, 4]
    assert_same_run(finished, folder)


def test_what_was_opened_is_closed_where_a_later_part_cannot_be_built(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    build = "practicum.backends.local.build"

    def opened(config: Any, context: Any) -> Any:
        from practicum.backends.local.backend import LocalBackend

        context.at_end.callback(closed.append, "backend")
        return LocalBackend(config, context)

    monkeypatch.setattr(build, opened)
    with pytest.raises(ModelError):
        toy_run(models, tmp_path, {"teacher.model": str(models / "nowhere")})
    assert closed == ["backend"]


@pytest.mark.parametrize("lag", [0, 1])
def test_two_runs_in_two_threads_keep_their_notes_apart(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lag: int
) -> None:
    names = ("one", "two")
    loading, both_there = threading.Lock(), threading.Barrier(2, timeout=60)

    def one_after_the_other(*arguments: Any, keeps_records: bool = False) -> Any:
        with loading:  # transformers loads one model at a time in a process
            built = assemble_run(*arguments, keeps_records=keeps_records)
        both_there.wait()
        return built

    monkeypatch.setattr("practicum.runs.session.assemble_run", one_after_the_other)

    def noted(name: str) -> list[str]:
        console = RecordingConsole()
        cached = {"type": "cached", "folder": str(tmp_path / name / "scores")}
        changes = {
            "teacher": {**cached, "teacher": {"type": "model", "model": str(models / "teacher")}}
        }
        toy_run(models, tmp_path / name, changes | {"rollout.max_staleness": lag}, console=console)
        return console.events

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(names, pool.map(noted, names), strict=True))
    for name in names:
        student, teacher, remark = found[name]
        assert (student, teacher) == (
            f"student: {models / 'student'}",
            f"teacher: {models / 'teacher'}",
        )
        assert (
            "completions were scored before" in remark and str(tmp_path / name / "scores") in remark
        )


def test_a_thread_that_works_ahead_notes_on_its_runs_console(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from practicum.training import asynchronous

    begin = asynchronous.generate_rollouts

    def noting(step: int, *more: Any, **names: Any) -> Any:
        log.info(f"sampling step {step}")
        return begin(step, *more, **names)

    monkeypatch.setattr(asynchronous, "generate_rollouts", noting)
    console = RecordingConsole()
    toy_run(models, tmp_path, {"rollout.max_staleness": 1}, console=console)
    assert [text for text in console.events if text.startswith("sampling")] == [
        f"sampling step {number}" for number in (1, 2, 3, 4)
    ]


def test_two_folders_with_one_model_are_named_at_the_start(
    models: Path, tmp_path: Path, notes: list[str]
) -> None:
    """Sixty steps of no divergence were run before anyone could see why."""
    twin = tmp_path / "twin"
    shutil.copytree(models / "student", twin)
    short = {"train.steps": 1, "evaluation.prompts": 0}
    go(models, tmp_path / "equal", **short, **{"teacher.model": str(twin)})
    (line,) = [note for note in notes if "teacher and student are the same" in note]
    assert "set {type: privileged" in line
    notes.clear()
    go(models, tmp_path / "told", **short, **{"teacher.model": str(twin), "teacher.system": "Hi."})
    go(models, tmp_path / "other", **short)
    assert not [note for note in notes if "teacher and student are the same" in note]


def test_a_run_that_fails_before_it_begins_leaves_no_folder(models: Path, tmp_path: Path) -> None:
    """Empty checkpoints and a lock stayed behind, which looked like a run, and models from scratch."""
    wrong = {"teacher.model": str(tmp_path / "nowhere")}
    made = {"student.model": {"hidden_size": 8, "layers": 1, "heads": 1}}
    for changes in (wrong, wrong | made):
        with pytest.raises(ModelError):
            go(models, tmp_path, **changes)
        assert not (tmp_path / "toy").exists()
    (tmp_path / "toy").mkdir()
    with pytest.raises(ModelError):
        go(models, tmp_path, **wrong)
    assert (tmp_path / "toy").is_dir(), "a folder that existed before is never removed"
