"""A run's folder as a model: the newest weights, written once into the cache as a model folder."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from toy import make_model, toy_recipe, toy_run

from practicum.errors import CheckpointError, RecipeError
from practicum.models.config import ScorerConfig, StudentConfig
from practicum.runs import open_student, run
from practicum.runs.opening import is_run, load_model, resolve_model, resolve_run


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "student", seed=1)
    make_model(folder / "teacher", seed=2)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRACTICUM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


LORA = {"student.lora": {"rank": 2, "alpha": 4.0}}


@pytest.mark.parametrize("changes", [{}, LORA], ids=["weights", "lora"])
def test_a_run_is_a_model_with_the_weights_of_its_export(
    models: Path, tmp_path: Path, cache: Path, changes: dict
) -> None:
    toy_run(models, tmp_path, {**changes, "train.steps": 2})
    folder = str(tmp_path / "toy")
    assert is_run(folder)
    backend, student = open_student(folder)
    backend.export(student, tmp_path / "export")
    resolved = resolve_run(ScorerConfig(model=folder))
    expected = load_file(tmp_path / "export" / "model.safetensors")
    read = load_file(Path(str(resolved.model)) / "model.safetensors")
    assert expected.keys() == read.keys()
    assert all(expected[name].equal(read[name]) for name in expected)
    assert Path(str(resolved.model)).parent == cache / "runs"
    assert resolve_run(ScorerConfig(model=folder)) == resolved
    assert len(list((cache / "runs").iterdir())) == 1
    assert load_model(ScorerConfig(model=folder)).source == resolved.model


def test_student_and_teacher_of_a_run_are_folders_of_runs(models: Path, tmp_path: Path) -> None:
    first = toy_run(models, tmp_path / "first", {"train.steps": 2})
    changes = {
        "student": str(first.folder),
        "teacher": {"type": "privileged", "system": "ab", "teacher": str(first.folder)},
        "train.steps": 2,
    }
    result = toy_run(models, tmp_path / "second", changes)
    saved = json.loads((result.folder / "recipe.json").read_text())
    assert saved["recipe"]["student"]["model"] == str(first.folder)
    assert saved["recipe"]["teacher"]["teacher"]["type"] == "model"
    assert {"student/model.safetensors", "teacher/model.safetensors"} <= saved["identity"].keys()
    open_student(result.folder)


def test_a_run_whose_origin_went_on_neither_resumes_nor_opens(models: Path, tmp_path: Path) -> None:
    first = toy_run(models, tmp_path / "first", {"train.steps": 2})
    changes = {"student": {"model": str(first.folder), **{"lora": {"rank": 2}}}, "train.steps": 2}
    result = toy_run(models, tmp_path / "second", changes)
    allowed = ["train.steps"]
    toy_run(models, tmp_path / "first", {"train.steps": 4}, resume=True, allow_changed=allowed)
    with pytest.raises(
        CheckpointError, match=r"started from .*first.toy, and the weights there have changed"
    ):
        open_student(result.folder)
    (result.folder / "summary.json").unlink()
    with pytest.raises(RecipeError, match=r"student/model\.safetensors changed"):
        toy_run(models, tmp_path / "second", changes, resume=True)


def test_a_run_says_what_its_weights_do_not_hold(
    models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    toy_run(models, tmp_path, {"train.steps": 1, "student.system": "ab"})
    with caplog.at_level("INFO", "practicum"):
        resolve_run(StudentConfig(model=str(tmp_path / "toy")))
    assert "was trained with system, which the weights do not hold" in caplog.text
    caplog.clear()
    with caplog.at_level("INFO", "practicum"):
        resolve_run(StudentConfig(model=str(tmp_path / "toy"), system="ab"))
    assert "system" not in caplog.text


def test_a_run_without_a_checkpoint_is_refused_in_one_line(models: Path, tmp_path: Path) -> None:
    result = toy_run(models, tmp_path / "first", {"train.steps": 2})
    shutil.rmtree(result.folder / "checkpoints")
    (result.folder / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        run(toy_recipe(models, {"student": str(result.folder)}), out=tmp_path / "second")


def test_a_model_of_a_run_serves_its_longest_text(tmp_path):
    recipe = toy_recipe(tmp_path, {"prompt_tokens": 100, "rollout.max_new_tokens": 28})
    resolved = resolve_model(recipe.student, recipe)
    assert resolved.longest_text == recipe.longest_text == 128
    named = recipe.student.model_copy(update={"longest_text": 500})
    assert resolve_model(named, recipe).longest_text == 500
