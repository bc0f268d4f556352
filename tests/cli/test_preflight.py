"""What `practicum run` and `check` find before a model is loaded."""

import json
import shutil
from pathlib import Path

import pytest
from toy import toy_recipe, write_recipe
from typer.testing import CliRunner

from practicum.cli.app import app
from practicum.errors import ModelError
from practicum.models.config import ModelConfig
from practicum.models.sources import locate
from practicum.recipe import Recipe
from practicum.studies.doctor import preflight
from practicum.studies.doctor.findings import CheckOutcome
from practicum.studies.doctor.preflight import find_warnings


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
    assert "teacher: http://localhost:1 is asked when the run starts" in result.output
    assert result.output.count("no CUDA device; write student.device=auto") == 1


def test_check_refuses_an_encoder_decoder_model(models: Path, tmp_path: Path) -> None:
    folder = tmp_path / "encoder"
    shutil.copytree(models / "student", folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "is_encoder_decoder": True}))
    path = write_recipe(models, tmp_path / "r.yaml", {"student.model": str(folder)})
    result = CliRunner().invoke(app, ["check", str(path)])
    assert result.exit_code == 2
    assert "is an encoder-decoder model" in " ".join(result.output.split())
