"""Runs over prompts with pictures: they train, resume to the same bytes, and refuse what cannot read pictures."""

import base64
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from picture_files import write_file
from safetensors.torch import load_file
from toy import assert_same_run, curve, forked, make_model, rows, said, toy_run, write_recipe
from vision_models import ALPHABET, build_vision_model

from practicum.errors import ModelError
from practicum.pictures import PictureReader, identify, identify_digest
from practicum.runs.exporting import export_run
from practicum.runs.thumbnails import Thumbnails
from practicum.types import Prompt, Rollout


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a student and a teacher that read pictures, and with rows."""
    folder = tmp_path_factory.mktemp("vision")
    build_vision_model(folder / "student", "qwen2_5_vl")
    build_vision_model(folder / "teacher", "qwen2_5_vl", seed=1)
    names = [write_file(folder, f"{seed}.png", seed) for seed in range(6)]
    lines = [
        {
            "id": name,
            "prompt": "<image>how many?",
            "images": [name],
            "teacher_images": ["0.png"],
            "answer": str(seed),
        }
        for seed, name in enumerate(names)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def settings(models: Path, **changes: Any) -> dict[str, Any]:
    return {
        "student": {"model": str(models / "student"), "lora": {"rank": 2}},
        "task": {"type": "jsonl", "path": str(models / "rows.jsonl"), "heldout": 2},
        "train.prompts_per_step": 4,
        "evaluation": {"prompts": 2},
        "optimizer.learning_rate": 0.05,
        **changes,
    }


@pytest.fixture(scope="module")
def finished(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_run(models, tmp_path_factory.mktemp("run"), settings(models)).folder


def test_a_run_learns_and_its_rows_name_the_pictures(models: Path, finished: Path) -> None:
    values = curve(finished, "reverse_kl")
    assert values[-1] < values[0]
    for row in rows(finished / "rollouts.jsonl"):
        number = identify((models / row["prompt"]).read_bytes())
        assert row["prompt_tokens"].count(number) == 4


def test_a_report_shows_each_picture_next_to_its_answers(models: Path, finished: Path) -> None:
    page = (finished / "report.html").read_text()
    copies = {path.stem: path.read_bytes() for path in (finished / "pictures").iterdir()}
    digests = {hashlib.sha256(path.read_bytes()).hexdigest() for path in models.glob("*.png")}
    assert set(copies) == digests
    for sample in json.loads((finished / "summary.json").read_text())["samples"]:
        [number] = sample["pictures"]
        [content] = [copy for name, copy in copies.items() if identify_digest(name) == number]
        assert base64.b64encode(content).decode() in page
    assert page.count('class="picture"') >= 2 * len(rows(finished / "rollouts.jsonl")[:6])


def test_a_picture_that_vanishes_leaves_the_run_alone(
    models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = (models / "0.png").read_bytes()
    rollout = Rollout.from_text(Prompt("0", ()), "one")
    reader = PictureReader("", lambda image: (), lambda number: str(tmp_path / "0.png"))
    Thumbnails(tmp_path, reader).write([replace(rollout, prompt_tokens=(identify(content),))])
    assert "the page shows no copy of a picture" in caplog.text
    assert not (tmp_path / "pictures").exists()


def test_killed_and_resumed_a_run_has_the_same_bytes(
    models: Path, finished: Path, tmp_path: Path
) -> None:
    changes = settings(models)
    assert (
        forked(lambda: toy_run(models, tmp_path, changes), {"PRACTICUM_FAULT": "update:3"}) == 137
    )
    assert_same_run(finished, toy_run(models, tmp_path, changes, resume=True).folder)


def test_a_trained_encoder_changes_and_resumes_to_the_same_bytes(
    models: Path, tmp_path: Path
) -> None:
    student = {"model": str(models / "student"), "train_encoder": True}
    changes = settings(models, student=student, **{"optimizer.learning_rate": 0.001})
    whole = toy_run(models, tmp_path / "whole", changes).folder
    out = tmp_path / "killed"
    assert forked(lambda: toy_run(models, out, changes), {"PRACTICUM_FAULT": "update:3"}) == 137
    assert_same_run(whole, toy_run(models, out, changes, resume=True).folder)
    exported = export_run(whole, tmp_path / "model").folder
    before, after = (load_file(f / "model.safetensors") for f in (models / "student", exported))
    changed = {name for name in after if not after[name].equal(before[name])}
    assert any("visual" in name for name in changed)


def test_the_students_own_weights_give_kl_zero(models: Path, tmp_path: Path) -> None:
    teacher = {"type": "model", "model": str(models / "student")}
    folder = toy_run(models, tmp_path, settings(models, teacher=teacher)).folder
    assert curve(folder, "reverse_kl")[0] == pytest.approx(0, abs=1e-6)


def test_an_export_has_the_processor_and_the_same_vision_tower(
    models: Path, finished: Path, tmp_path: Path
) -> None:
    export_run(finished, tmp_path / "export")
    before, after = (
        load_file(folder / "model.safetensors")
        for folder in (models / "student", tmp_path / "export")
    )
    vision = [name for name in before if "visual" in name]
    assert vision
    assert all(torch.equal(before[name], after[name]) for name in vision)
    assert not all(torch.equal(before[name], after[name]) for name in before)
    changes = settings(models, student=str(tmp_path / "export"), **{"train.steps": 1})
    toy_run(models, tmp_path, changes)


@pytest.mark.parametrize("images", ["none", "teacher"])
def test_a_teacher_of_the_same_weights_differs_by_its_picture(
    models: Path, tmp_path: Path, images: str
) -> None:
    teacher = {
        "type": "privileged",
        "teacher": {"type": "self", "weights": "frozen"},
        "images": images,
    }
    changes = settings(models, teacher=teacher, **{"train.steps": 1, "evaluation": {"prompts": 0}})
    folder = toy_run(models, tmp_path, changes).folder
    assert curve(folder, "reverse_kl")[0] > 1e-4


@pytest.mark.parametrize("images", [None, "none"])
def test_the_gap_of_a_context_is_zero_without_a_difference(
    models: Path, tmp_path: Path, images: str | None
) -> None:
    teacher = {"type": "self", "weights": "frozen"}
    reference = (
        teacher if images is None else {"type": "privileged", "teacher": teacher, "images": images}
    )
    changes = settings(
        models,
        teacher=teacher,
        reference=reference,
        objective={"signal": "full", "divergence": "forward_kl", "weights": "by_context(0.5)"},
        **{"train.steps": 1, "evaluation": {"prompts": 0}},
    )
    [gap] = curve(toy_run(models, tmp_path, changes).folder, "context_gap")
    assert gap == pytest.approx(0, abs=1e-6) if images is None else abs(gap) > 1e-4


def test_a_model_of_text_refuses_pictures_before_the_first_step(
    models: Path, tmp_path: Path
) -> None:
    make_model(tmp_path / "text", alphabet=ALPHABET)
    for role in ("student", "teacher"):
        changes = settings(
            models, name=role, **{role: {"type": "model", "model": str(tmp_path / "text")}}
        )
        if role == "student":
            changes["student"] = {"model": str(tmp_path / "text")}
        with pytest.raises(
            ModelError, match="a prompt has pictures or sounds, and they are not read here"
        ):
            toy_run(models, tmp_path, changes)
        assert not (tmp_path / role / "checkpoints").exists()


def test_a_plan_counts_the_tokens_of_pictures(models: Path, tmp_path: Path) -> None:
    recipe = write_recipe(models, tmp_path / "recipe.yaml", settings(models))
    status, text = said(tmp_path, "plan", str(recipe))
    assert status == 0, text
    assert "it fits" in text
