"""Sharded teachers: in separate processes, and together with the trainers."""

from pathlib import Path
from typing import Any

import pytest
from toy import toy_recipe, toy_run

from practicum.backends.ray import Config
from practicum.errors import RecipeError, WorkerLost

from .ray_session import cluster
from .test_ray import assert_close_runs, on_ray, pytestmark, single

assert cluster and pytestmark and single

PLACES: list[dict[str, Any]] = [
    {"teachers": "beside"},
    {"trainers": 1, "teachers": 2, "teacher_shards": 2},
]


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("place", PLACES, ids=["beside", "in shards"])
def test_a_teacher_in_shards_gives_the_run_of_one_process(
    models: Path, tmp_path: Path, single: Path, place: dict[str, Any]
) -> None:
    changes = on_ray(**place) | {"evaluation.teacher": False}
    assert_close_runs(single, toy_run(models, tmp_path, changes).folder)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_teachers_shard_that_dies_is_named(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRACTICUM_FAULT", "teacher-1.score:2")
    changes = on_ray(1, teachers=2, teacher_shards=2) | {"evaluation.teacher": False}
    with pytest.raises(WorkerLost, match="teacher 1 was lost in score"):
        toy_run(models, tmp_path, changes)


@pytest.mark.parametrize("changes", [{"teachers": "beside"}, {"teachers": 2, "teacher_shards": 2}])
def test_residency_of_a_teacher_in_shards_is_refused(models: Path, changes: dict[str, Any]) -> None:
    """At recipe parsing, wherever the model is in the recipe."""
    inside = {
        "type": "privileged",
        "teacher": {"type": "model", "model": str(models / "teacher"), "residency": "swap"},
        "system": "Reverse.",
    }
    for name in ("teacher", "reference"):
        with pytest.raises(
            RecipeError, match=rf"{name}.teacher.residency: 'swap' moves a whole model"
        ):
            toy_recipe(models, on_ray(1, **changes) | {name: inside})
    toy_recipe(models, on_ray(1) | {"teacher": inside})


@pytest.mark.parametrize("changes", [{}, {"teachers": "beside"}])
def test_a_base_for_several_models_is_refused(models: Path, changes: dict[str, Any]) -> None:
    shared = {"type": "model", "model": str(models / "teacher"), "residency": "shared"}
    with pytest.raises(RecipeError, match=r"teacher.residency: 'shared' keeps one base") as found:
        toy_recipe(models, on_ray(1, **changes) | {"teacher": shared})
    assert len(found.value.problems) == 1


def test_fewer_bits_of_a_teacher_in_shards_are_refused(models: Path) -> None:
    rounded = {"teacher.quantization": "int8"}
    with pytest.raises(RecipeError, match=r"teacher\.quantization: 'int8' rounds a whole model"):
        toy_recipe(models, on_ray(1, teachers=2, teacher_shards=2) | rounded)
    assert toy_recipe(models, on_ray(1, teachers=2) | rounded).teacher.quantization == "int8"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"teachers": 3, "teacher_shards": 2}, "set teachers: 2"),
        ({"teachers": "beside", "teacher_shards": 2}, "leave teacher_shards out"),
        ({"teachers": 0}, "greater than or equal to 1"),
        ({"teachers": "aside"}, "beside"),
    ],
)
def test_groups_that_cannot_be_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Config(**settings)
