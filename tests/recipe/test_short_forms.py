"""A text in place of a section that names only a model."""

from pathlib import Path
from typing import Any

import pytest

from practicum.errors import RecipeError
from practicum.recipe import load_recipe, parse_recipe
from practicum.recipe.short_forms import expand_models

REST: dict[str, Any] = {"task": {"type": "reverse"}, "train": {"steps": 1}}


def test_a_text_is_the_model_of_a_student_and_of_a_teacher() -> None:
    recipe = parse_recipe({**REST, "student": "a/b", "teacher": "c/d", "reference": "e/f"}, "r")
    assert recipe.student.model == "a/b"
    assert (recipe.teacher.type, recipe.teacher.model) == ("model", "c/d")
    assert recipe.reference is not None
    assert recipe.reference.model == "e/f"


@pytest.mark.parametrize("kind", ["self", "none"])
def test_the_name_of_a_type_stays_a_type(kind: str) -> None:
    assert expand_models({"teacher": kind}) == {"teacher": kind}


def test_teachers_inside_others_are_written_out_as_well() -> None:
    inner = {"type": "model", "model": "a/b"}
    data = {
        "teacher": {"type": "privileged", "teacher": "a/b", "system": "x"},
        "reference": {"type": "route", "key": "domain", "teachers": {"one": "a/b", "two": "self"}},
        "stages": [{"name": "first", "teacher": "a/b"}],
    }
    expanded = expand_models(data)
    assert expanded["teacher"]["teacher"] == inner
    assert expanded["reference"]["teachers"] == {"one": inner, "two": "self"}
    assert expanded["stages"] == [{"name": "first", "teacher": inner}]


def test_folders_beside_a_recipe_file_are_found(tmp_path: Path) -> None:
    for name in ("small", "large"):
        (tmp_path / name).mkdir()
    file = tmp_path / "my.yaml"
    file.write_text("student: small\nteacher: large\ntask: reverse\ntrain: {steps: 1}\n")
    recipe = load_recipe(file)
    assert recipe.student.model == str(tmp_path / "small")
    assert recipe.teacher.model == str(tmp_path / "large")
    assert load_recipe(file, ["student.lora.rank=2"]).student.lora is not None
    assert load_recipe(file, ["teacher=a/b"]).teacher.model == "a/b"


def test_a_mistyped_type_of_teacher_is_still_refused_as_one() -> None:
    with pytest.raises(RecipeError, match="no teacher named 'slef'; did you mean 'self'"):
        parse_recipe({**REST, "student": "a/b", "teacher": "slef"}, "r")
