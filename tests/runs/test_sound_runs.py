"""Runs over prompts with sounds: they train, resume to the same bytes, and a teacher may read the transcript."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from toy import assert_same_run, curve, forked, make_model, toy_run

from practicum.backends.local.pictures import SOUND_FAMILIES
from practicum.errors import ModelError
from practicum.runs.exporting import export_run


@pytest.fixture(scope="module", params=SOUND_FAMILIES)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a student and a teacher that read sounds, and a model of text."""
    folder = tmp_path_factory.mktemp("speech")
    for seed, role in enumerate(("student", "teacher")):
        make_model(folder / role, alphabet="0123456789=", architecture=request.param, seed=seed)
    make_model(folder / "text", alphabet="0123456789=")
    return folder


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "task": {"type": "spoken", "train_size": 8, "heldout_size": 2},
        "train.prompts_per_step": 4,
        "evaluation": {"prompts": 2},
        "optimizer.learning_rate": 0.005,
        "train.steps": 6,
        **changes,
    }


def test_a_run_learns_resumes_and_exports_what_it_has_learned(
    models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    finished = toy_run(models, tmp_path / "whole", settings()).folder
    values = curve(finished, "reverse_kl")
    assert values[-1] < values[0]
    assert "picture" not in caplog.text, "sounds have no small copies"

    killed = tmp_path / "killed"
    fault = {"PRACTICUM_FAULT": "update:3"}
    assert forked(lambda: toy_run(models, killed, settings()), fault) == 137
    assert_same_run(finished, toy_run(models, killed, settings(), resume=True).folder)

    lines = export_run(finished, tmp_path / "export").describe()
    assert any("AutoModelForSeq2SeqLM.from_pretrained" in line for line in lines)
    before, after = (
        load_file(folder / "model.safetensors")
        for folder in (models / "student", tmp_path / "export")
    )
    frozen = [name for name in before if "audio_tower" in name or "projector" in name]
    assert frozen
    assert all(torch.equal(before[name], after[name]) for name in frozen)
    assert not all(torch.equal(before[name], after[name]) for name in before)
    # A student that begins with the export is its own teacher.
    export = str(tmp_path / "export")
    teacher = {"type": "model", "model": export}
    changes = settings(student={"model": export}, teacher=teacher, **{"train.steps": 1})
    folder = toy_run(models, tmp_path / "again", changes).folder
    assert curve(folder, "reverse_kl")[0] == pytest.approx(0, abs=1e-6)


def test_a_teacher_of_the_same_weights_reads_the_transcript(models: Path, tmp_path: Path) -> None:
    teacher: dict[str, Any] = {
        "type": "privileged",
        "teacher": {"type": "model", "model": str(models / "text")},
        "question": "{transcript}=",
        "images": "none",
    }
    values = []
    for inner in (teacher["teacher"], {"type": "self", "weights": "frozen"}):
        changes = settings(
            teacher={**teacher, "teacher": inner}, name=inner["type"], **{"train.steps": 1}
        )
        values += curve(toy_run(models, tmp_path, changes).folder, "reverse_kl")
    assert min(values) > 1e-4


def test_a_model_of_text_refuses_sounds_before_the_first_step(models: Path, tmp_path: Path) -> None:
    for role in ("student", "teacher"):
        text = {"type": "model"} if role == "teacher" else {}
        changes = settings(name=role, **{role: {**text, "model": str(models / "text")}})
        with pytest.raises(ModelError, match="pictures or sounds, and they are not read here"):
            toy_run(models, tmp_path, changes)
        assert not (tmp_path / role / "checkpoints").exists()
