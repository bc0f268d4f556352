"""A run that loses a process continues by itself, with the remaining resources of its cluster."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from toy import RecordingConsole, toy_recipe

from practicum.backends.ray import Config
from practicum.errors import PracticumError, TooFewGpus, WorkerLost
from practicum.runs import RunResult, launch, run
from practicum.runs.session import Session


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Collect the trainers of each session, and whether it resumes; `ENDS` lists how each session ends."""
    seen: list[tuple[int, bool]] = []

    def execute(self: Session, allow_changed: object, *, resume: bool) -> RunResult:
        backend = self.recipe.backend
        assert isinstance(backend, Config)
        seen.append((backend.trainers, resume))
        self.run_dir.recipe_json.write_text("{}", encoding="utf-8")
        error = next(ENDS)
        if error is not None:
            raise error
        return RunResult(self.run_dir.path, {})

    monkeypatch.setattr(launch.Session, "execute", execute)
    return seen


ENDS: Iterator[PracticumError | None]


def lack(trainers: int) -> TooFewGpus:
    return TooFewGpus("6 GPUs are needed", "ask for fewer", [f"backend.trainers={trainers}"])


def test_after_a_loss_fewer_trainers_go_on_with_one_line_that_says_so(
    models: Path, tmp_path: Path, sessions: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = iter(
        [WorkerLost("trainer 1 was lost", 2), lack(3), lack(1), WorkerLost("trainer 0", 2), None]
    )
    monkeypatch.setitem(globals(), "ENDS", ends)
    console = RecordingConsole()
    recipe = toy_recipe(models, {"backend": {"type": "ray", "trainers": 4, "restarts": 2}})
    run(recipe, out=tmp_path, console=console)
    assert sessions == [(4, False), (4, True), (3, True), (1, True), (1, True)]
    assert [line for line in console.events if "going on" in line] == [
        "warning: trainer 1 was lost; going on by itself, 1 of 2 times",
        "warning: 6 GPUs are needed; going on with backend.trainers=3",
        "warning: 6 GPUs are needed; going on with backend.trainers=1",
        "warning: trainer 0; going on by itself, 2 of 2 times",
    ]


@pytest.mark.parametrize(
    "ends",
    [
        [lack(3)],
        [WorkerLost("trainer 1 was lost", 2), TooFewGpus("6 GPUs are needed", "ask for fewer")],
    ],
    ids=["at the start", "none would be left"],
)
def test_otherwise_too_few_gpus_end_the_run(
    models: Path,
    tmp_path: Path,
    sessions: list[tuple[int, bool]],
    monkeypatch: pytest.MonkeyPatch,
    ends: list[PracticumError],
) -> None:
    monkeypatch.setitem(globals(), "ENDS", iter(ends))
    recipe = toy_recipe(models, {"backend": {"type": "ray", "trainers": 4, "restarts": 2}})
    with pytest.raises(TooFewGpus, match=r"^6 GPUs are needed; ask for fewer$"):
        run(recipe, out=tmp_path)
    assert len(sessions) == len(ends)
