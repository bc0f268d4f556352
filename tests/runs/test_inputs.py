"""`practicum check` opens the data and the settings of models."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from text.test_renderer import byte_tokenizer
from toy import make_model, toy_run

from practicum.errors import RecipeError
from practicum.recipe import parse_recipe
from practicum.runs.inputs import check_inputs
from practicum.runs.stages import parse_pipeline


def recipe(folder: Path, **sections: Any) -> dict[str, Any]:
    return {
        "base_dir": str(folder),
        "student": {"model": "Qwen/Qwen3-0.6B"},
        "teacher": {"type": "model", "model": "Qwen/Qwen3-8B"},
        "task": {"type": "jsonl", "path": "rows.jsonl"},
        "train": {"steps": 2},
        **sections,
    }


def problems(data: dict[str, Any]) -> list[str]:
    with pytest.raises(RecipeError) as refusal:
        check_inputs(parse_recipe(data, "r.yaml"), "r.yaml")
    return str(refusal.value).splitlines()


def write_model(folder: Path) -> str:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "tokenizer.json").write_text("{}")
    return str(folder)


def test_everything_that_is_missing_is_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    (tmp_path / "held.csv").write_text("question\nq\n")
    (Path(write_model(tmp_path / "wordless")) / "tokenizer.json").unlink()
    members = {
        "a": {"type": "model", "model": str(tmp_path / "broken")},
        "b": {"type": "model", "model": str(tmp_path / "wordless")},
    }
    lines = problems(
        recipe(
            tmp_path,
            student={"model": "./missing"},
            teacher={"type": "route", "teachers": members},
            reference={"type": "model", "model": str(tmp_path)},
            task={"type": "jsonl", "path": "rows.jsonl", "heldout": "held.csv"},
        )
    )
    starts = [
        f"r.yaml: task: {tmp_path}/rows.jsonl cannot be read (No such file or directory)",
        f"r.yaml: task: {tmp_path}/held.csv: all of its 1 rows are unusable; row 1 is",
        "r.yaml: student: no model './missing'",
        f"r.yaml: teacher.teachers.a: {tmp_path}/broken/config.json: not JSON",
        f"r.yaml: teacher.teachers.b: {tmp_path}/wordless: no tokenizer (tokenizer.json, or",
        f"r.yaml: reference: {tmp_path}: no config.json",
    ]
    assert len(lines) == len(starts)
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True)), lines


def test_what_is_there_or_elsewhere_is_no_problem(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p", "answer": 1}\n{"prompt": "q"}\n')
    student = {"model": write_model(tmp_path / "student")}
    byte_tokenizer().save_pretrained(tmp_path / "student")
    check_inputs(parse_recipe(recipe(tmp_path, student=student), "r.yaml"), "r.yaml")
    assert not (tmp_path / "rejected.jsonl").exists()
    task = {"type": "datasets", "path": "openai/gsm8k"}
    check_inputs(parse_recipe(recipe(tmp_path, task=task), "r.yaml"), "r.yaml")
    scratch = {"model": {"hidden_size": 16}}
    check_inputs(parse_recipe(recipe(tmp_path, student=scratch), "r.yaml"), "r.yaml")


def test_a_missing_file_of_two_stages_is_reported_once(tmp_path: Path) -> None:
    stages = [{"name": "one"}, {"name": "two", "start": "one"}]
    stages[1]["teacher"] = {"type": "model", "model": {"stage": "one"}}  # type: ignore[assignment]
    pipeline = parse_pipeline({**recipe(tmp_path), "stages": stages}, "p.yaml")
    with pytest.raises(RecipeError) as refusal:
        check_inputs(pipeline, "p.yaml")
    (line,) = str(refusal.value).splitlines()
    assert "rows.jsonl cannot be read" in line


def test_the_folder_of_a_run_is_a_model(tmp_path: Path, notes: list[str]) -> None:
    make_model(tmp_path / "student", seed=1)
    make_model(tmp_path / "teacher", seed=2)
    run_folder = toy_run(tmp_path, tmp_path, {"train.steps": 1}).folder
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p", "answer": 1}\n{"prompt": "q"}\n')
    model = {"model": str(run_folder)}
    given = recipe(tmp_path, student=model, teacher={"type": "model", **model})
    check_inputs(parse_recipe(given, "r.yaml"), "r.yaml")
    assert not any("as a model folder" in note for note in notes), "check loads no model"
    shutil.rmtree(next((run_folder / "checkpoints").iterdir()))
    assert problems(given) == [
        f"r.yaml: {role}: {run_folder}: no checkpoint yet; resume the run, or give a model folder instead"
        for role in ("student", "teacher")
    ]


def test_rows_are_read_to_the_end(tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": f"p{number}"}) for number in range(50)]
    (tmp_path / "rows.jsonl").write_text("\n".join([*rows, "{", "}"]))
    (line,) = problems(recipe(tmp_path))
    assert "2 of 52 rows cannot be used; row 51 is {: not JSON" in line
