"""The best checkpoint of a run: saved when it is found, kept, named, and the same after a kill."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from toy import assert_same_run, curve, forked, make_model, rows, toy_recipe, toy_run

from practicum import evaluate
from practicum.errors import CheckpointError, RecipeError
from practicum.report.outcome_verdict import RunSettings, is_destroyed
from practicum.run_dir.checkpoints import step_folders
from practicum.runs.opening import open_student, resolve_run, resolve_stage

# At this rate the divergence falls, rises and falls, so that a step in the middle is the best.
TURNING: dict[str, Any] = {
    "train": {
        "steps": 8,
        "prompts_per_step": 8,
        "keep_checkpoints": 1,
        "metric_for_best_model": "reverse_kl",
        "threads": 1,
    },
    "evaluation": {"prompts": 8, "every": 1},
    "optimizer": {"learning_rate": 0.01},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "student", seed=1)
    make_model(folder / "teacher", seed=2)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRACTICUM_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def turned(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with a best step between its first and its last."""
    return toy_run(models, tmp_path_factory.mktemp("turned"), TURNING).folder


def read_summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def list_checkpoints(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").iterdir()}


def test_the_best_step_outlives_later_ones_and_every_text_names_it(turned: Path) -> None:
    scores = curve(turned, "heldout_reverse_kl")
    best = scores.index(min(scores)) + 1
    assert 1 < best < 8, "the run no longer turns, so it shows nothing"
    assert list_checkpoints(turned) == {f"step-{best}", "step-8"}
    summary = read_summary(turned)
    assert summary["best"] == {
        "metric": "reverse_kl",
        "step": best,
        "score": min(scores),
        "last": scores[-1],
    }
    line = f"best checkpoint by reverse KL: step {best} of 8 ({min(scores):.2f}, at the end "
    assert any(reason.startswith(line) for reason in summary["verdict"]["reasons"])
    assert summary["verdict"]["next"][0] == "practicum eval RUN@best --rows OTHER_ROWS.jsonl"
    assert line in (turned / "report.html").read_text()


def test_its_weights_are_those_of_the_step(turned: Path) -> None:
    best = read_summary(turned)["best"]
    newest = evaluate(turned)
    measured = evaluate(f"{turned}@best")
    assert measured["reverse_kl"] == pytest.approx(best["score"], rel=1e-6)
    assert newest["reverse_kl"] == pytest.approx(best["last"], rel=1e-6)
    assert evaluate(f"{turned}@{best['step']}") == measured


def test_it_is_a_model_of_other_recipes(turned: Path, models: Path, tmp_path: Path) -> None:
    name = f"{turned}@best"
    backend, student = open_student(name)
    backend.export(student, tmp_path / "export")
    resolved = Path(str(resolve_run(toy_recipe(models, {"student": name}).student).model))
    expected, read = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "export", resolved)
    )
    assert all(expected[key].equal(read[key]) for key in expected)
    changes = {"student": name, "teacher": name, "train.steps": 1}
    run = toy_run(models, tmp_path / "second", changes).folder
    saved = json.loads((run / "recipe.json").read_text())["recipe"]
    assert saved["student"]["model"] == saved["teacher"]["model"] == name


@pytest.mark.parametrize("fault", ["update:3", "save.before_rename:2", "save.after_rename:3"])
def test_killed_and_resumed_the_best_step_and_its_weights_are_the_same(
    turned: Path, models: Path, tmp_path: Path, fault: str
) -> None:
    assert forked(lambda: toy_run(models, tmp_path, TURNING), {"PRACTICUM_FAULT": fault}) == 137
    cut = toy_run(models, tmp_path, TURNING, resume=True).folder
    assert_same_run(turned, cut)
    assert list_checkpoints(cut) == list_checkpoints(turned)
    best = f"checkpoints/step-{read_summary(turned)['best']['step']}/student.safetensors"
    assert (cut / best).read_bytes() == (turned / best).read_bytes()


@pytest.mark.parametrize("background", [False, True])
def test_a_run_that_is_still_going_on_has_a_best_step_too(
    turned: Path, models: Path, tmp_path: Path, background: bool
) -> None:
    changes = {**TURNING, "train": {**TURNING["train"], "save_in_background": background}}
    assert forked(lambda: toy_run(models, tmp_path, changes), {"PRACTICUM_FAULT": "score:6"}) == 137
    cut = tmp_path / "toy"
    # A save in the background may not be done when the process is killed.
    saved = {step for step, _ in step_folders(cut / "checkpoints")}
    measured = [row for row in rows(cut / "metrics.jsonl") if row["step"] in saved]
    row = min(measured, key=lambda row: row["heldout_reverse_kl"])
    assert evaluate(f"{cut}@best")["reverse_kl"] == pytest.approx(
        row["heldout_reverse_kl"], rel=1e-6
    )


def test_a_run_that_ended_early_compares_its_last_step_too(models: Path, tmp_path: Path) -> None:
    train = {**TURNING["train"], "budget": {"tokens": 200}}
    changes = {**TURNING, "train": train, "evaluation": {"prompts": 8, "every": 4}}
    folder = toy_run(models, tmp_path, changes).folder
    best = read_summary(folder)["best"]
    assert len(rows(folder / "metrics.jsonl")) == 5, "the budget no longer ends it after step 5"
    assert best["step"] == 5 and best["last"] == best["score"]
    assert best["score"] < rows(folder / "metrics.jsonl")[3]["heldout_reverse_kl"]
    assert evaluate(f"{folder}@best") == evaluate(folder)


def test_a_run_with_more_steps_later_is_one_with_them_from_the_start(
    turned: Path, models: Path, tmp_path: Path
) -> None:
    longer = {**TURNING, "train": {**TURNING["train"], "steps": 7}, "name": "toy"}
    toy_run(models, tmp_path, longer)
    grown = toy_run(models, tmp_path, TURNING, resume=True, allow_changed=["train.steps"]).folder
    assert_same_run(turned, grown, journals=("metrics.jsonl", "rollouts.jsonl"))


def test_the_last_step_of_a_pipeline_is_named_in_the_same_way(tmp_path: Path) -> None:
    stage = tmp_path / "stages" / "1-first"
    stage.mkdir(parents=True)
    (stage / "recipe.json").write_text("{}")
    assert resolve_stage(f"{tmp_path}@best") == f"{stage}@best"
    assert resolve_stage(str(tmp_path)) == str(stage)


def test_a_folder_with_such_a_name_is_that_folder(turned: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(turned, tmp_path / "run@best")
    shutil.copytree(turned, tmp_path / "run")
    assert evaluate(copied) == evaluate(turned)


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("@7", r"no checkpoint of step 7; there are \d, 8"),
        ("@99999", r"no checkpoint of step 99999"),
    ],
)
def test_a_step_without_a_checkpoint_is_refused_with_those_there_are(
    turned: Path, target: str, problem: str
) -> None:
    with pytest.raises(CheckpointError, match=problem):
        evaluate(f"{turned}{target}")


def test_a_run_without_a_metric_has_no_best_step(models: Path, tmp_path: Path) -> None:
    folder = toy_run(models, tmp_path, {"train.steps": 1}).folder
    with pytest.raises(CheckpointError, match=r"sets no train.metric_for_best_model"):
        evaluate(f"{folder}@best")


@pytest.mark.parametrize(
    ("evaluation", "problem"),
    [
        ({"prompts": 8}, r"the recipe has none; set evaluation.every: 1$"),
        ({"prompts": 0, "every": 2}, r"every: 1 and evaluation.prompts: 64"),
    ],
)
def test_without_evaluations_during_training_the_recipe_is_refused(
    models: Path, evaluation: Mapping[str, Any], problem: str
) -> None:
    with pytest.raises(RecipeError, match=problem):
        toy_recipe(models, {**TURNING, "evaluation": evaluation})


def test_a_metric_that_cannot_be_measured_is_refused_before_training(
    models: Path, tmp_path: Path
) -> None:
    lines = [json.dumps({"prompt": f"abc{'abcd'[n % 4]}{'abcd'[n // 4]}"}) for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    task = {"type": "jsonl", "path": str(tmp_path / "rows.jsonl"), "heldout": 4}
    train = {**TURNING["train"], "metric_for_best_model": "accuracy"}
    with pytest.raises(RecipeError, match="have no finite accuracy; write reverse_kl"):
        toy_run(models, tmp_path, {**TURNING, "task": task, "train": train})
    assert not rows(tmp_path / "toy" / "metrics.jsonl")


def measured(**changes: Any) -> dict[str, Any]:
    plain = {
        "prompts": 32,
        "accuracy": {"mean": 0.5},
        "truncated": 0.0,
        "looping_answers": 0.0,
        "equal_answers": 0.0,
        "student_entropy": 1.0,
        "student_entropy_estimate": None,
        "reverse_kl": 0.5,
        "reverse_kl_estimate": None,
    }
    return {**plain, **changes}


@pytest.mark.parametrize(
    ("after", "gain", "expected"),
    [
        ({}, (0.0, 0.1), False),
        ({"reverse_kl": 0.1, "looping_answers": 0.9}, (-0.1, 0.1), True),
        ({"reverse_kl": 0.1, "truncated": 0.9}, (-0.1, 0.1), True),
        ({"reverse_kl": 0.1, "truncated": 0.9}, (0.1, 0.3), False),
        ({"reverse_kl": 6.0, "equal_answers": 1.0}, (-0.1, 0.1), True),
        ({"reverse_kl": 0.1, "equal_answers": 1.0}, (-0.1, 0.1), False),
    ],
)
def test_a_student_whose_answers_stopped_ending_is_not_sound_however_close_it_is(
    after: dict[str, Any], gain: tuple[float, float], expected: bool
) -> None:
    settings = RunSettings(1e-5, 32, 10, aims_at_teacher=True)
    numbers = {
        "before": measured(),
        "after": measured(**after),
        "gain": {"mean": sum(gain) / 2, "low": gain[0], "high": gain[1]},
        "alarms": {},
    }
    assert is_destroyed(numbers, settings) == expected
