"""Toy pairs and recipes for what is measured about runs as a whole: a task of strings, models made from scratch, seconds a run."""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from practicum.backends.local.scratch import build_scratch_model
from practicum.core.plugins import load_plugin
from practicum.errors import AlarmError, NumericError
from practicum.models.config import PretrainConfig, ScratchConfig
from practicum.monitors import MONITORS
from practicum.recipe import parse_recipe
from practicum.runs import run
from practicum.tasks import TaskContext

TASK = {
    "type": "reverse",
    "alphabet": "abcd",
    "shortest": 2,
    "longest": 3,
    "train_size": 64,
    "heldout_size": 16,
}
WIDTH = 32


@dataclass(frozen=True, slots=True)
class Played:
    """The outcome of a run: its rows, its alarms, its summary (empty where it did not come to its end), and how it ended."""

    rows: list[dict[str, Any]]
    alarms: list[dict[str, Any]]
    summary: dict[str, Any]
    ended: str

    def list_ids(self) -> list[str]:
        """Return the monitors that spoke, each once, in the order in which they did."""
        return list(dict.fromkeys(alarm["id"] for alarm in self.alarms if alarm["action"] != "log"))

    def average_last(self, name: str, count: int = 5) -> float:
        """Return the mean of a reading's newest values."""
        values = [row[name] for row in self.rows if row.get(name) is not None][-count:]
        return sum(values) / len(values)


@contextmanager
def pair(
    student: int, teacher: int, seed: int = 0, task: Mapping[str, Any] | None = None
) -> Iterator[Path]:
    """A folder with a `student` and a `teacher`, after so many steps of supervised training each; `task` changes the task."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = build_task_data(task or {})
        module = load_plugin("tasks", settings["type"])
        config = module.Config(**settings)
        prompts = module.build(config, TaskContext(seed=0, base_dir=folder)).train_prompts()
        for number, (who, steps) in enumerate((("student", student), ("teacher", teacher))):
            made = ScratchConfig(
                hidden_size=WIDTH,
                layers=1,
                heads=2,
                seed=2 * seed + number,
                pretrain=PretrainConfig(steps=steps),
            )
            build_scratch_model(folder / who, made, config.alphabet, prompts)
        yield folder


def build_task_data(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The toy task with changes, or another one where they name its type."""
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
