"""A run prints and records the dtype that `auto` chooses, and resumes only with the same choice."""

import json
from pathlib import Path

import pytest
from toy import make_model, toy_recipe, toy_run

from practicum.backends.local.precision import choose_dtype
from practicum.errors import RecipeError
from practicum.runs.plan.dry_runs import simulate_step
from practicum.teachers.model import compute_fingerprint


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "student", seed=1)
    teacher = make_model(folder / "teacher", seed=2)
    config = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return folder


def choose_as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `auto` choose on this CPU what it chooses on CUDA."""
    monkeypatch.setattr(
        "practicum.backends.local.loading.choose_dtype",
        lambda config, source, _: choose_dtype(config, source, "cuda"),
    )


def read_identity(folder: Path) -> dict[str, str]:
    identity = json.loads((folder / "toy" / "recipe.json").read_text())["identity"]
    return {name: dtype for name, dtype in identity.items() if name.endswith("/dtype")}


def test_a_run_records_and_prints_what_auto_chose(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {"train.steps": 2}
    toy_run(models, tmp_path / "cpu", changes)
    assert read_identity(tmp_path / "cpu") == {}
    with monkeypatch.context() as patch:
        choose_as_on_cuda(patch)
        toy_run(models, tmp_path / "auto", changes)
    lines = [note for note in caplog.messages if note.startswith("dtype: auto")]
    assert [line.partition(";")[0] for line in lines] == [
        "dtype: auto: student bfloat16, teacher bfloat16"
    ]
    expected = {"student/dtype": "bfloat16", "teacher/dtype": "bfloat16"}
    assert read_identity(tmp_path / "auto") == expected
    half = {"student.dtype": "bfloat16", "teacher.dtype": "bfloat16"}
    toy_run(models, tmp_path / "named", changes | half)
    assert read_identity(tmp_path / "named") == {}
    one, other, cpu = (
        (tmp_path / name / "toy" / "rollouts.jsonl").read_bytes()
        for name in ("auto", "named", "cpu")
    )
    assert one == other != cpu

    more = changes | {"train.steps": 3}
    with pytest.raises(RecipeError) as refused:
        toy_run(models, tmp_path / "auto", more, resume=True)
    line = str(refused.value)
    assert "dtype: auto was bfloat16 for the student" in line and "\n" not in line
    assert "is float32 here; resume on the kind of device" in line
    with monkeypatch.context() as patch:
        choose_as_on_cuda(patch)
        toy_run(models, tmp_path / "auto", more, resume=True)
        with pytest.raises(RecipeError, match=r"auto was float32 for the student .* bfloat16 here"):
            toy_run(models, tmp_path / "cpu", more, resume=True)


def test_a_plan_takes_auto_for_that_of_the_planned_device(models: Path) -> None:
    recipe = toy_recipe(models)
    here, there = (simulate_step(recipe, None, for_cluster=flag).record for flag in (False, True))
    assert (here.dtype, there.dtype) == ("float32", "bfloat16")
    dtypes = [record.scorers["teacher"].config.dtype for record in (here, there)]  # type: ignore[union-attr]
    assert dtypes == ["float32", "bfloat16"]


def test_stored_scores_of_a_cpu_keep_their_name(models: Path) -> None:
    """`auto` is float32 there, so a store that was written before `auto` is found again."""
    recipes = [
        toy_recipe(models, {"teacher.dtype": dtype}) for dtype in ("auto", "float32", "bfloat16")
    ]
    auto, full, half = (compute_fingerprint(recipe.teacher) for recipe in recipes)  # type: ignore[arg-type]
    assert auto == full != half
