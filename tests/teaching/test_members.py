"""The teachers inside a teacher's settings: their names, their paths, and whether any follows the student."""

import contextlib
from typing import Any

import pytest

from practicum.core.plugins import read_plugin
from practicum.errors import RecipeError
from practicum.ports import Capabilities, TeacherContext, TeacherServices, walk

RENDERER: Any = None
MODEL = {"type": "model", "model": "somewhere"}
SELF = {"type": "self", "weights": "frozen"}
TEAM = {
    "a": {"type": "privileged", "system": "x", "teacher": MODEL},
    "teacher": {"type": "cached", "teacher": MODEL},
}


def test_every_teacher_inside_is_passed_with_the_keys_that_lead_to_it() -> None:
    config = read_plugin(
        "teachers",
        {"type": "privileged", "system": "y", "teacher": {"type": "pool", "teachers": TEAM}},
    )
    passed = [(keys, inside.type) for keys, inside in walk(config)]
    assert passed == [
        ((), "privileged"),
        (("teacher",), "pool"),
        (("teacher", "teachers.a"), "privileged"),
        (("teacher", "teachers.a", "teacher"), "model"),
        (("teacher", "teachers.teacher"), "cached"),
        (("teacher", "teachers.teacher", "teacher"), "model"),
    ]


def test_models_have_the_role_and_the_names_of_the_members_around_them_as_their_path() -> None:
    config = read_plugin(
        "teachers",
        {"type": "privileged", "system": "y", "teacher": {"type": "pool", "teachers": TEAM}},
    )
    paths: list[str] = []

    class Listing(TeacherServices):
        def load_model(self, config: Any, path: str) -> Any:
            paths.append(path)
            raise LookupError

        def build_teacher(self, context: TeacherContext, config: Any) -> Any:
            # Wrappers need the teacher that was not built, which is not tested here.
            with contextlib.suppress(LookupError, RecipeError, AttributeError):
                return super().build_teacher(context, config)

    TeacherContext(RENDERER, Listing(), path="reference").build(config)
    assert paths == ["reference/a", "reference/teacher"]


@pytest.mark.parametrize(
    ("settings", "follows"),
    [
        (MODEL, False),
        (SELF, True),
        ({"type": "none"}, False),
        ({"type": "expert"}, False),
        ({"type": "scripted", "tape": "t"}, False),
        ({"type": "openai_api", "url": "http://localhost:1"}, False),
        ({"type": "openai_api", "url": "http://localhost:1", "dialect": "chat"}, False),
        ({"type": "chat_api", "url": "http://localhost:1", "model": "m"}, False),
        ({"type": "text_only", "teacher": MODEL}, False),
        ({"type": "text_only", "teacher": SELF}, True),
        ({"type": "tinker", "url": "http://localhost:1", "model": "m"}, False),
        ({"type": "cached", "teacher": MODEL}, False),
        ({"type": "privileged", "system": "x", "teacher": SELF}, True),
        ({"type": "pool", "teachers": TEAM}, False),
        ({"type": "pool", "teachers": {**TEAM, "b": SELF}}, True),
        ({"type": "route", "teachers": {**TEAM, "b": {"type": "none"}}}, False),
        ({"type": "route", "teachers": {"a": {"type": "none"}, "b": SELF}}, True),
    ],
    ids=str,
)
def test_a_teacher_follows_the_student_where_one_inside_does(
    settings: dict[str, Any], follows: bool
) -> None:
    assert read_plugin("teachers", settings).capabilities().follows_student is follows


def test_a_teacher_that_declares_nothing_is_taken_to_follow_the_student() -> None:
    assert Capabilities(frozenset({"sampled"})).follows_student
