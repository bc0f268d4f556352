"""A command that failed before the first step of its run starts again."""

import json
import signal
from itertools import product
from pathlib import Path

import pytest
from toy import toy_recipe

from practicum.errors import Interrupted, RecipeError
from practicum.runs.launch import run


def write_rows(letters: str) -> str:
    """Return the rows of a task that reverses eight different texts of these letters."""
    texts = ["".join(text) for text in product(letters, repeat=3)][:8]
    return "".join(json.dumps({"prompt": text, "answer": text[::-1]}) + "\n" for text in texts)


def test_data_may_change_after_a_run_that_was_stopped_before_its_first_step(
    models: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(write_rows("ab"))
    changes = {"task": {"type": "jsonl", "path": str(rows)}, "train.steps": 1}
    recipe = toy_recipe(models, changes)
    with pytest.raises(Interrupted, match="before step 1"):
        run(recipe, out=tmp_path / "runs", stop=lambda: signal.SIGTERM, progress=False)
    assert (tmp_path / "runs" / "toy" / "recipe.json").is_file()
    rows.write_text(write_rows("abc"))
    result = run(recipe, out=tmp_path / "runs", progress=False)
    assert result.summary["steps"] == 1


def test_a_run_after_a_finished_one_has_the_next_name(
    models: Path, tmp_path: Path, notes: list[str]
) -> None:
    recipe = toy_recipe(models, {"train.steps": 1, "train.prompts_per_step": 1})
    names = [run(recipe, out=tmp_path, progress=False).folder.name for _ in range(3)]
    assert names == ["toy", "toy-2", "toy-3"]
    assert sum("holds a finished run, so the new run is toy-" in note for note in notes) == 2
    # Options that name a run refer to the run of the recipe's own name.
    assert run(recipe, out=tmp_path, resume=True, progress=False).folder.name == "toy"
    assert run(recipe, out=tmp_path, overwrite=True, progress=False).folder.name == "toy"
    named = recipe.model_copy(update={"name": "toy-2"})
    assert run(named, out=tmp_path, resume=True, progress=False).folder.name == "toy-2"


def test_a_run_with_the_next_name_says_how_to_resume_it(
    models: Path, tmp_path: Path, notes: list[str]
) -> None:
    recipe = toy_recipe(models, {"train.steps": 1, "train.prompts_per_step": 1})
    run(recipe, out=tmp_path, progress=False)
    with pytest.raises(Interrupted):
        run(recipe, out=tmp_path, stop=lambda: signal.SIGTERM, progress=False)
    assert 'to resume it, use resume=True and overrides=["name=toy-2"]' in notes[-1]
    # It failed before its first step, so its name is free.
    assert run(recipe, out=tmp_path, progress=False).folder.name == "toy-2"


def test_an_unfinished_run_is_no_reason_for_another_name(models: Path, tmp_path: Path) -> None:
    recipe = toy_recipe(models, {"train.prompts_per_step": 1})
    calls = iter([None, signal.SIGTERM, signal.SIGTERM])
    with pytest.raises(Interrupted):
        run(recipe, out=tmp_path, stop=lambda: next(calls), progress=False)
    rows = (tmp_path / "toy" / "metrics.jsonl").read_bytes()
    with pytest.raises(RecipeError, match="already holds a run; use resume=True"):
        run(recipe, out=tmp_path, progress=False)
    assert rows and (tmp_path / "toy" / "metrics.jsonl").read_bytes() == rows


def test_a_refused_resume_names_the_way_to_begin_again(models: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(write_rows("ab"))
    task = {"type": "jsonl", "path": str(rows)}
    changes = {"task": task, "train.steps": 1, "train.prompts_per_step": 1}
    recipe = toy_recipe(models, changes)
    folder = run(recipe, out=tmp_path, progress=False).folder
    (folder / "summary.json").unlink()
    saved = json.loads((folder / "recipe.json").read_text())
    saved["identity"]["teacher/decoding"] = "another processor"
    (folder / "recipe.json").write_text(json.dumps(saved))
    ways = "leave resume=True out for a new run, with overwrite=True in place of this one"
    with pytest.raises(RecipeError, match=f"the teacher decoded by another processor.*{ways}"):
        run(recipe, out=tmp_path, resume=True, progress=False)
    # The files are compared before the decoder, and the recipe before the files.
    rows.write_text(write_rows("abc"))
    with pytest.raises(RecipeError, match=f"since the run began, .*{ways}"):
        run(recipe, out=tmp_path, resume=True, progress=False)
    other = toy_recipe(models, {**changes, "objective.divergence": "forward_kl"})
    with pytest.raises(
        RecipeError, match=f"the recipe changed since the run began; {ways}, or undo"
    ):
        run(other, out=tmp_path, resume=True, progress=False)
