"""Check a recipe before a model is loaded: by `practicum run` and `check`, and from Python."""

import json
import shutil
from pathlib import Path

import pytest
from toy import toy_data, toy_recipe, write_recipe
from typer.testing import CliRunner

import practicum
from practicum.cli.app import app
from practicum.errors import ModelError
from practicum.models.config import ModelConfig
from practicum.models.sources import locate
from practicum.recipe import Recipe
from practicum.runs import preflight, vocabularies
from practicum.runs.check_outcome import CheckOutcome
from practicum.runs.preflight import find_warnings
from practicum.runs.stages import parse_pipeline
from practicum.runs.vocabularies import find_contradictions


def test_a_rate_far_above_the_table_is_named_and_nothing_else(models: Path) -> None:
    assert find_warnings(toy_recipe(models, {"optimizer.learning_rate": 1e-4})) == []
    (warning,) = find_warnings(toy_recipe(models, {"optimizer.learning_rate": 0.5}))
    assert warning.startswith("P19 settings: learning rate 0.5 is ")


def test_memory_is_estimated_for_models_that_can_fill_it_only(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[str] = []

    def judge(recipe: Recipe) -> CheckOutcome:
        planned.append(str(recipe.student.model))
        return CheckOutcome("fail", "about 99 of 9 GiB")

    monkeypatch.setattr(preflight, "judge_memory", judge)
    assert find_warnings(toy_recipe(models)) == []
    assert find_warnings(toy_recipe(models, {"student.model": {"hidden_size": 64}})) == []
    assert not planned
    large = {"hidden_size": 1024, "layers": 2, "heads": 2}
    for changes in ({"student.model": large}, {"teacher.model": "my-org/model-1B"}):
        assert find_warnings(toy_recipe(models, changes)) == ["P17 memory: about 99 of 9 GiB"]
    assert len(planned) == 2


def test_a_new_run_names_the_doctor_before_it_loads_a_model(models: Path, tmp_path: Path) -> None:
    path = write_recipe(models, tmp_path / "r.yaml")
    words = ["run", str(path), "optimizer.learning_rate=0.5", "train.steps=0"]
    result = CliRunner().invoke(app, [*words, "--out", str(tmp_path)])
    assert result.exit_code == 2 and "practicum doctor" not in result.output, (
        "a mistake comes first"
    )
    words = [
        "run",
        str(path),
        "optimizer.learning_rate=0.5",
        "train.steps=1",
        "evaluation.prompts=0",
    ]
    result = CliRunner().invoke(app, [*words, "--out", str(tmp_path)])
    text = " ".join(result.output.split())
    assert f"practicum doctor {path} optimizer.learning_rate=0.5" in text
    assert text.index("P19 settings") < text.index("step 1/1")


def test_a_tokenizer_of_another_model_is_refused(models: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    shutil.copytree(models / "student", folder)
    assert locate(ModelConfig(model=str(folder))) == str(folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "vocab_size": 151_936}))
    with pytest.raises(ModelError, match="tokens and the model's embedding 151936 rows"):
        locate(ModelConfig(model=str(folder)))


def test_check_names_servers_and_devices_that_are_not_here(models: Path, tmp_path: Path) -> None:
    path = write_recipe(models, tmp_path / "r.yaml")
    teacher = "teacher={type: tinker, url: 'http://localhost:1', model: x}"
    words = ["check", str(path), teacher, "objective={signal: sampled}", "student.device=cuda"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0
    assert "teacher: http://localhost:1 is contacted when the run starts" in result.output
    assert result.output.count("no CUDA device; set student.device=auto") == 1


def test_check_refuses_an_encoder_decoder_model(models: Path, tmp_path: Path) -> None:
    folder = tmp_path / "encoder"
    shutil.copytree(models / "student", folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "is_encoder_decoder": True}))
    path = write_recipe(models, tmp_path / "r.yaml", {"student.model": str(folder)})
    result = CliRunner().invoke(app, ["check", str(path)])
    assert result.exit_code == 2
    assert "is an encoder-decoder model" in " ".join(result.output.split())


def _build_pair(models: Path, folder: Path) -> dict[str, str]:
    """Return a student and a teacher on disk; the teacher's tokenizer has two tokens exchanged."""
    teacher = folder / "exchanged"
    shutil.copytree(models / "teacher", teacher)
    path = teacher / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(tokenizer))
    return {"student.model": str(models / "student"), "teacher.model": str(teacher)}


@pytest.mark.parametrize("command", ["check", "run"])
def test_a_teacher_with_other_tokens_is_refused_before_its_weights_are_read(
    models: Path, tmp_path: Path, command: str
) -> None:
    changes = _build_pair(models, tmp_path)
    # Its weights cannot be read, so a run that loads them raises another error.
    weights = Path(changes["teacher.model"]) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    path = write_recipe(models, tmp_path / "r.yaml", changes)
    result = CliRunner().invoke(app, [command, str(path)])
    assert result.exit_code == 2, result.output
    text = " ".join(result.output.split())
    assert "teacher: the teacher's vocabulary is" in text and "type: translated" in text


def test_tokenizers_in_the_cache_of_the_hub_are_compared_too(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = Path(_build_pair(models, tmp_path)["teacher.model"])
    cached = {"my-org/known": str(teacher / "tokenizer.json"), "my-org/unknown": None}
    monkeypatch.setattr(vocabularies, "try_to_load_from_cache", lambda name, file: cached[name])
    (line,) = find_contradictions(toy_recipe(models, {"teacher.model": "my-org/known"}))
    assert line.startswith("teacher: the teacher's vocabulary is ")
    assert not list(find_contradictions(toy_recipe(models, {"teacher.model": "my-org/unknown"})))


def test_a_translated_teacher_may_have_other_tokens(models: Path, tmp_path: Path) -> None:
    changes = _build_pair(models, tmp_path)
    inner = {"type": "model", "model": changes.pop("teacher.model")}
    changes |= {
        "teacher": {"type": "translated", "teacher": inner},
        "objective": {"signal": "sampled"},
    }
    path = write_recipe(models, tmp_path / "r.yaml", changes)
    assert CliRunner().invoke(app, ["check", str(path)]).exit_code == 0


def test_a_stage_of_a_pipeline_is_named_in_its_warning(models: Path) -> None:
    data = toy_data(models)
    stages = [
        {"name": "first"},
        {"name": "second", "start": "first", "optimizer": {"learning_rate": 0.5}},
    ]
    (warning,) = find_warnings(parse_pipeline({**data, "stages": stages}, "p.yaml"))
    assert warning.startswith("second: P19 settings: learning rate 0.5 is ")
    for stage in stages:
        stage["optimizer"] = {"learning_rate": 0.5}
    (warning,) = find_warnings(parse_pipeline({**data, "stages": stages}, "p.yaml"))
    assert warning.startswith("P19 settings")


def test_a_run_from_python_warns_as_the_command_does(
    models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {"train.steps": 1, "evaluation.prompts": 0, "optimizer.learning_rate": 0.5}
    data = toy_data(models, changes)
    sections = {
        key: data[key]
        for key in ("student", "teacher", "task", "rollout", "optimizer", "train", "evaluation")
    }
    practicum.distill(**sections, out=tmp_path, progress=False)
    practicum.run(
        str(write_recipe(models, tmp_path / "r.yaml", changes)), out=tmp_path, progress=False
    )
    warnings = [record.message for record in caplog.records if "P19 settings" in record.message]
    assert [warning.rpartition("; ")[2] for warning in warnings] == [
        "practicum.doctor(recipe) shows more before the first step",
        f"practicum doctor {tmp_path / 'r.yaml'} shows more before the first step",
    ]
