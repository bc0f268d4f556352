"""The Python interface as a notebook uses it: names, sections, short results and their tables."""

import inspect
from pathlib import Path
from typing import Any

import pandas
import pytest
from section_types import TARGET, format_module
from toy import toy_data, toy_recipe, toy_run

import practicum
from practicum.errors import CapabilityError, RecipeError
from practicum.recipe import Recipe
from practicum.runs import RunResult
from practicum.studies.compare.outcomes import ArmResult, ComparisonResult, Outcome
from practicum.studies.doctor import doctor

NOT_SECTIONS = {
    "family",
    "teacher_effect",
    "paper",
    "claim",
    "differs",
    "formula",
    "reduced",
    "slot",
    "base_dir",
    "schedules",
}
"""Descriptions of a packaged recipe, and keys that reading a recipe derives."""


def test_completion_lists_the_public_names() -> None:
    assert dir(practicum) == sorted(["__version__", *practicum.__all__])
    assert all(practicum.__getattr__(name) for name in practicum.__all__)


def test_distill_takes_every_section() -> None:
    parameters = inspect.signature(practicum.distill).parameters
    assert parameters.keys() >= Recipe.model_fields.keys() - NOT_SECTIONS


def test_the_typed_dicts_are_those_of_the_models() -> None:
    assert TARGET.read_text(encoding="utf-8") == format_module(), "python -m tests.test_docs"


def test_a_cell_can_be_run_again_under_the_next_name_or_in_its_place(
    models: Path, tmp_path: Path
) -> None:
    data: dict[str, Any] = toy_data(models, {"train.steps": 1})
    first = practicum.distill(**data, out=tmp_path, progress=False)
    second = practicum.distill(**data, out=tmp_path, progress=False)
    assert second.folder.name == f"{first.folder.name}-2"
    (first.folder / "mine.txt").write_text("kept")
    again = practicum.distill(**data, out=tmp_path, overwrite=True, progress=False)
    assert again.summary == first.summary and (first.folder / "mine.txt").is_file()
    with pytest.raises(RecipeError, match="a run is either continued or replaced"):
        practicum.run(toy_recipe(models), out=tmp_path, resume=True, overwrite=True)


def test_a_teacher_is_given_where_the_objective_asks_one(models: Path, tmp_path: Path) -> None:
    data = toy_data(models, {"objective": {"signal": "score(group_mean)"}, "rollout.n": 2})
    del data["teacher"]
    data["train"]["steps"] = 1
    assert practicum.distill(**data, out=tmp_path, progress=False).summary["steps"] == 1
    with pytest.raises(
        CapabilityError, match=r"'full' needs a teacher and the recipe has none; set t"
    ):
        practicum.distill(**{**data, "objective": {"signal": "full"}}, out=tmp_path)


def test_a_result_is_a_line_a_card_and_a_table(models: Path, finished: Path) -> None:
    result = toy_run(models, finished.parent, {"evaluation.prompts": 8}, resume=True)
    assert len(repr(result)) < 200 and "\n" not in repr(result)
    assert repr(result).startswith(f"RunResult({finished}: TOO FEW PROMPTS: accuracy 0.")
    card = result._repr_html_()
    assert "<th>teacher</th>" in card and "toy: TOO FEW PROMPTS" in card and "Try next:" in card
    table = pandas.DataFrame(result.metrics())
    assert list(table["step"]) == [1, 2, 3, 4] and "reverse_kl" in table


def test_a_card_escapes_the_texts_of_a_run(tmp_path: Path) -> None:
    summary = {"name": "<script>", "gain": None, "steps": 3, "ended": "<b>", "domains": []}
    verdict = {"verdict": "WORSE", "reasons": ["<i>"], "next": ["<i>"]}
    evaluations = dict.fromkeys(("before", "after", "teacher"))
    card = RunResult(tmp_path / "<i>", {**summary, **evaluations, "verdict": verdict})._repr_html_()
    assert "<script>" not in card and "<b>" not in card.replace("<p><b>", "") and "<i>" not in card


def test_a_diagnosis_is_a_line_and_a_card(models: Path) -> None:
    diagnosis = doctor(toy_recipe(models), prompts=2, samples=1, progress=False)
    line = repr(diagnosis)
    assert line.startswith("Diagnosis(toy: ") and "\n" not in line and len(line) < 400
    assert diagnosis.verdict.word in diagnosis._repr_html_()


def test_a_comparison_is_a_line_a_card_and_a_table() -> None:
    arms = [
        ArmResult(name, "m", 1, 0, {"BETTER": 1}, 0.5, None, 0.1, {"steps": 2.0})
        for name in ("a", "<b>")
    ]
    outcome = Outcome("a", 0, "a/seed-0", "BETTER", 0.5, 0.1, {"steps": 2.0}, {}, [], False)
    result = ComparisonResult("accuracy", arms, [], [outcome], [], ["a is better", "by 0.1"])
    assert repr(result) == "ComparisonResult(a, <b>: a is better)"
    assert "&lt;b&gt;" in result._repr_html_() and "by 0.1" in result._repr_html_()
    (row,) = result.metrics()
    assert row == {
        "arm": "a",
        "seed": 0,
        "verdict": "BETTER",
        "accuracy": 0.5,
        "reverse_kl": 0.1,
        "reverse_kl_estimate": None,
        "steps": 2.0,
    }
