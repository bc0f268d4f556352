"""Provide toy pairs and recipes to measure whole runs: a task of strings, models made from scratch, seconds per run."""

import json
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from practicum.backends.local.scratch import build_scratch_model
from practicum.core.plugins import load_plugin
from practicum.errors import AlarmError, NumericError
from practicum.models.config import PretrainConfig, ScratchConfig
from practicum.monitors import MONITORS
from practicum.ports import TaskContext
from practicum.recipe import parse_recipe
from practicum.runs import run
from practicum.tasks.calculator import SCHEMA, Expressions
from practicum.tasks.walker import Walker
from practicum.types import Message, Prompt

TASK = {
    "type": "reverse",
    "alphabet": "abcd",
    "shortest": 2,
    "longest": 3,
    "train_size": 64,
    "heldout_size": 16,
}
WIDTH = 32
SUMS = {
    "type": "benchmarks.bent_calculator",
    "digits": 1,
    "operators": "+",
    "turns": 8,
    "train_size": 60,
    "heldout_size": 8,
}
"""Sums that a tool works out. An expert of this task sometimes asks it once more after a result."""
CALLING: dict[str, Any] = {"rollout.n": 4, "rollout.max_new_tokens": 192, "train.steps": 24}
"""The settings that all runs on sums share."""
SHOWING_TOOLS = (
    "{% if tools %}<system>{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ '<assistant>' if m.role == 'assistant' else '<user>' }}"
    "{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A template with the names of the tools, which renders results like questions."""
WITHOUT_ROLES = (
    "{% for m in messages %}{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ '</s>' }}{% endif %}{% endfor %}"
)
"""A template without marks of roles: an action directly follows the digits that it answers."""


@dataclass(frozen=True, slots=True)
class Played:
    """The outcome of a run: its rows, its alarms, its summary (empty where it did not come to its end), and how it ended."""

    rows: list[dict[str, Any]]
    alarms: list[dict[str, Any]]
    summary: dict[str, Any]
    ended: str

    def list_ids(self) -> list[str]:
        """Return the monitors that raised alarms, each once, in order of their first alarm."""
        return list(dict.fromkeys(alarm["id"] for alarm in self.alarms if alarm["action"] != "log"))

    def average_last(self, name: str, count: int = 5) -> float:
        """Return the mean of a reading's newest values."""
        values = [row[name] for row in self.rows if row.get(name) is not None][-count:]
        return sum(values) / len(values)


@contextmanager
def pair(
    student: int, teacher: int, seed: int = 0, task: Mapping[str, Any] | None = None
) -> Iterator[Path]:
    """Create a folder with a `student` and a `teacher`, with these supervised steps; `task` changes the task."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = build_task_data(task or {})
        module = load_plugin("tasks", settings["type"])
        config = module.Config(**settings)
        built = module.build(config, TaskContext(seed=0, base_dir=folder))
        prompts, alphabet, template = built.train_prompts(), "", None
        if isinstance(built, Expressions):
            prompts, alphabet, template = draw_lessons(built), built.letters, SHOWING_TOOLS
        elif isinstance(built, Walker):
            prompts, alphabet, template = list_first_actions(built), built.letters, WITHOUT_ROLES
        for number, (who, steps) in enumerate((("student", student), ("teacher", teacher))):
            made = ScratchConfig(
                hidden_size=WIDTH,
                layers=1,
                heads=2,
                seed=2 * seed + number,
                pretrain=PretrainConfig(steps=steps),
            )
            build_scratch_model(folder / who, made, alphabet or config.alphabet, prompts)
            if template is not None:
                (folder / who / "chat_template.jinja").write_text(template, encoding="utf-8")
        yield folder


def draw_lessons(task: Expressions) -> list[Prompt]:
    """Return the expert's conversation about each expression, with tool and results as in `SHOWING_TOOLS`."""
    lessons = []
    for prompt in task.train_prompts():
        draw, turns = random.Random(prompt.id), list[str]()
        messages = [Message("system", SCHEMA.name), *prompt.messages]
        while len(turns) < task.toolbox.turns and prompt.answer not in turns:
            texts = task.expert(prompt, turns)
            turns += draw.choices(list(texts), list(texts.values()))
            lessons.append(Prompt(f"{prompt.id} {len(turns)}", tuple(messages), answer=turns[-1]))
            messages += [Message("assistant", turns[-1]), Message("user", str(prompt.answer))]
    return lessons


def list_first_actions(task: Walker) -> list[Prompt]:
    """Return the expert's best action in the first turn of each walk."""
    lessons = []
    for prompt in task.train_prompts():
        actions = task.expert(prompt, ())
        lessons.append(replace(prompt, answer=max(actions, key=lambda action: actions[action])))
    return lessons


def build_task_data(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the toy task with changes, or another task if the changes name its type."""
    return {**({} if "type" in changes else TASK), **changes}


def build_recipe_data(models: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe of seconds; `changes` are dotted keys, for example `train.steps`."""
    recipe: dict[str, Any] = {
        "name": "toy",
        "student": {"model": str(models / "student")},
        "teacher": {"type": "model", "model": str(models / "teacher")},
        "task": dict(TASK),
        "rollout": {"n": 2, "max_new_tokens": 8},
        "objective": {"signal": "full", "divergence": "reverse_kl"},
        "optimizer": {"learning_rate": 0.001},
        "train": {"steps": 40, "prompts_per_step": 8, "threads": 1},
        "evaluation": {"prompts": 0},
    }
    for key, value in changes.items():
        *parents, last = key.split(".")
        place = recipe
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return recipe


def play(models: Path, changes: Mapping[str, Any]) -> Played:
    """Run the toy recipe; an alarm that ends it, or numbers that do, is part of the answer."""
    ended = ""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        try:
            run(parse_recipe(build_recipe_data(models, changes), "toy"), out=out, progress=False)
        except (AlarmError, NumericError) as error:
            ended = str(error)
        folder = out / "toy"
        summary = folder / "summary.json"
        return Played(
            _read_lines(folder / "metrics.jsonl"),
            _read_lines(folder / "alarms.jsonl"),
            json.loads(summary.read_text()) if summary.is_file() else {},
            ended,
        )


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def list_warnings(ids: Sequence[str]) -> dict[str, str]:
    """Return the section `monitors` under which none of these ends the run; what is off by default stays off."""
    return {name: "warn" for name in ids if MONITORS[name].action != "off"}
