"""A teacher or a task is one file: in the plug-in folder of its kind, or in any package, named with dots."""

from pathlib import Path

import pytest
from toy import rows, toy_recipe, toy_run

from practicum.core.plugins import list_plugins, load_plugin
from practicum.recipe import parse_recipe, resolve_recipe

TEACHER = '''
"""Every token is as likely as every other, but for the letter it likes."""

from typing import Literal

import torch
from practicum.ports import Capabilities, Teacher, TeacherConfig
from practicum.types import TeacherSignal


class Config(TeacherConfig):
    type: Literal["mypackage.even"] = "mypackage.even"
    liked: float = -1.0

    def capabilities(self):
        return Capabilities(signals=frozenset({"sampled"}), writes=False)


class Even(Teacher):
    def __init__(self, liked):
        self.liked = liked

    capabilities = Capabilities(signals=frozenset({"sampled"}), writes=False)

    def score(self, rollouts, signal):
        return [TeacherSignal(logprobs=torch.full((len(rollout.tokens),), self.liked)) for rollout in rollouts]


def build(config, context):
    return Even(config.liked)
'''

TASK = '''
"""Say it again."""

from typing import Literal

from practicum.ports import Task, TaskConfig
from practicum.types import Message, Prompt


class Config(TaskConfig):
    type: Literal["mypackage.again"] = "mypackage.again"
    words: tuple[str, ...] = ("ab", "cd", "ba")


class Again(Task):
    def __init__(self, words):
        self.words = words

    def train_prompts(self):
        return [Prompt(word, (Message("user", word),), answer=word) for word in self.words]

    def heldout_prompts(self):
        return []

    def reward(self, rollout):
        return float(rollout.text == rollout.prompt.answer)


def build(config, context):
    return Again(config.words)
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a separate package with a teacher and a task."""
    folder = tmp_path / "site" / "mypackage"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "even.py").write_text(TEACHER)
    (folder / "again.py").write_text(TASK)
    monkeypatch.syspath_prepend(str(folder.parent))
    return "mypackage"


def test_a_teacher_and_a_task_of_ones_own_train_a_student(
    models: Path, package: str, tmp_path: Path
) -> None:
    changes = {
        "teacher": {"type": "mypackage.even", "liked": -0.5},
        "task": {"type": "mypackage.again", "words": ["ab", "cd"]},
        "objective": {"signal": "sampled"},
        "train.steps": 2,
    }
    recorded = rows(toy_run(models, tmp_path, changes).folder / "rollouts.jsonl")
    assert {row["prompt"] for row in recorded} == {"ab", "cd"}
    assert {value for row in recorded for value in row["teacher_logprobs"]} == {-0.5}


def test_the_dotted_name_survives_the_resolved_recipe(models: Path, package: str) -> None:
    changes = {"teacher": {"type": "mypackage.even"}, "objective": {"signal": "sampled"}}
    recipe = toy_recipe(models, changes)
    assert resolve_recipe(recipe)["teacher"] == {"type": "mypackage.even", "liked": -1.0}
    assert parse_recipe(resolve_recipe(recipe), "again") == recipe


def test_the_settings_of_a_plugin_are_checked_like_all_others(models: Path, package: str) -> None:
    with pytest.raises(ValueError, match=r"teacher.*likde: no such key; did you mean 'liked'"):
        toy_recipe(
            models,
            {"teacher": {"type": "mypackage.even", "likde": 1}, "objective": {"signal": "sampled"}},
        )


@pytest.mark.parametrize("room", ["teachers", "tasks"])
def test_every_file_of_a_room_has_settings_and_a_builder(room: str) -> None:
    assert list_plugins(room)
    for name in list_plugins(room):
        module = load_plugin(room, name)
        assert module.Config.model_fields["type"].default == name
        assert callable(module.build) and module.__doc__


@pytest.mark.parametrize("name", ["modell", "_client", "", "../model", "model "])
def test_a_name_that_is_no_file_is_refused_with_the_nearest(name: str) -> None:
    with pytest.raises(
        ValueError,
        match=r"no teacher named .*known: cached, chat_api, expert, model, none, openai_api, pool, .*self",
    ):
        load_plugin("teachers", name)


@pytest.mark.parametrize("name", ["os.path", "json.decoder", "torch.nn"])
def test_a_module_that_is_no_plugin_is_refused_by_name(models: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"teacher.*{name}"):
        toy_recipe(models, {"teacher": {"type": name}})


@pytest.mark.parametrize("name", ["..model", ".model", "a..b", "no.such.module", "a b.c"])
def test_a_dotted_name_that_leads_nowhere_is_a_mistake_of_the_recipe(
    models: Path, name: str
) -> None:
    with pytest.raises(ValueError, match="teacher"):
        toy_recipe(models, {"teacher": {"type": name}})
