"""A run with models in another process equals the run of one process, byte for byte."""

from pathlib import Path
from typing import Any

import pytest
from toy import toy_recipe, toy_run

from backends.child.held import ASK
from practicum.errors import RecipeError, ResourceError
from practicum.objective import Full
from practicum.runs.assembly import assemble_run
from practicum.studies.doctor import doctor
from practicum.types import ScoreRequest

pytestmark = pytest.mark.long
CHILD = {"backend": {"type": "backends.child"}}
RUNS: dict[str, dict[str, Any]] = {
    "a teacher's whole distribution": {"evaluation.prompts": 8},
    "a following teacher": {"teacher": {"type": "self", "weights": "ema"}},
    "rollouts ahead": {"rollout.max_staleness": 1},
    "candidates and a reference": {
        "reference": {"type": "self"},
        "objective": {
            "losses": [{"signal": "topk(4)"}, {"signal": "sampled", "against": "reference"}]
        },
    },
}


SHORT = ("a following teacher", "candidates and a reference")
"""The runs of the suite; `make slow` does all of them."""


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(changes, id=name, marks=() if name in SHORT else pytest.mark.slow)
        for name, changes in RUNS.items()
    ],
)
def test_a_toy_run_gives_the_same_bytes(
    models: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    here, there = (
        toy_run(models, tmp_path / name, changes | more).folder
        for name, more in (("here", {}), ("there", CHILD))
    )
    for name in ("rollouts.jsonl", "metrics.jsonl", "checkpoints/step-4/student.safetensors"):
        assert (here / name).read_bytes() == (there / name).read_bytes(), name


def test_states_are_held_for_as_long_as_somebody_has_their_name(
    models: Path, tmp_path: Path
) -> None:
    built = assemble_run(toy_recipe(models, CHILD), tmp_path)
    client = built.backend.build_sampler(built.student)

    def names() -> list[str]:
        return [name for name in built.backend.ask("names_held") if name.startswith("states")]  # type: ignore[attr-defined]

    first, second = client.score(
        [ScoreRequest((8, 4), (7, 8, 2)), ScoreRequest((8, 4), (7, 2))], Full()
    )
    assert len(names()) == 2
    part = first[:2]
    del first
    assert names() == [second.hidden.name]  # type: ignore[union-attr]
    assert part.states is not None and len(part.states) == 2
    del second
    assert not names()
    built.close()


def test_what_looks_into_weights_is_refused_before_anything_is_drawn(
    models: Path, notes: list[str]
) -> None:
    with pytest.raises(
        RecipeError,
        match="the student's weights, which are in another process or at a service; leave",
    ):
        doctor(toy_recipe(models, CHILD), prompts=4, samples=1)
    assert not any("the student answers" in line for line in notes)
    assert not ASK, "its child has ended"


def test_it_is_resumed_from_its_checkpoint(models: Path, tmp_path: Path) -> None:
    whole = toy_run(models, tmp_path / "whole", CHILD).folder
    toy_run(models, tmp_path / "cut", CHILD | {"train.steps": 2})
    cut = toy_run(
        models, tmp_path / "cut", CHILD, resume=True, allow_changed=["train.steps"]
    ).folder
    assert (cut / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_a_child_that_is_lost_ends_the_run_in_one_line(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from backends.child.parent import ChildTrainer

    def die(self: ChildTrainer, params: object) -> None:
        self._backend.process.kill()
        self._backend.ask("optim_step", params)

    monkeypatch.setattr(ChildTrainer, "optim_step", die)
    with pytest.raises(
        ResourceError, match=r"^the child process was lost in optim_step; resume with --resume$"
    ):
        toy_run(models, tmp_path, CHILD)
