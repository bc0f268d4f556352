"""Choose the starting values of a recipe by its student, and find the pairs that recipes are tried on.

A value that a recipe does not set comes from the row of `SETTINGS` that its student fits.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from practicum.core.packaged import locate_packaged_recipes
from practicum.core.plugins import list_plugins, load_plugin
from practicum.models.size import count_parameters
from practicum.models.starting_values import SETTINGS, Setting
from practicum.run_dir import RunDir

SETTINGS_FOLDER = "settings"
"""The folder, among the packaged recipes, of the pairs of models and tasks that recipes are tried on."""


@dataclass(frozen=True, slots=True)
class SettingChoice:
    """The row for a student, what it sets, and how the student's size was found."""

    setting: Setting
    has_adapters: bool
    on_cpu: bool
    size: str

    def list_values(self) -> dict[str, float]:
        """Return the values by their paths in a recipe."""
        row = self.setting
        values: dict[str, float] = {
            "optimizer.learning_rate": row.adapter_learning_rate
            if self.has_adapters
            else row.learning_rate,
            "optimizer.warmup_steps": row.warmup_steps,
            "train.prompts_per_step": row.prompts_per_step,
            "train.steps": row.steps,
            "rollout.max_new_tokens": row.cpu_max_new_tokens if self.on_cpu else row.max_new_tokens,
        }
        if self.has_adapters:
            values |= {"student.lora.rank": row.rank, "student.lora.alpha": row.alpha}
        return values

    def list_missing(self, recipe_data: Mapping[str, Any]) -> dict[str, float]:
        """Return values for a recipe, adjusted to the settings that it has.

        A recipe with its own rate has no warm-up, and alpha keeps its ratio to the rank, unless the backend
        fixes it.
        """
        values = self.list_values()
        optimizer = recipe_data.get("optimizer")
        if isinstance(optimizer, Mapping) and "learning_rate" in optimizer:
            del values["optimizer.warmup_steps"]
        rank = recipe_data["student"]["lora"].get("rank") if self.has_adapters else None
        if isinstance(rank, int) and rank > 0:
            values["student.lora.alpha"] *= rank / self.setting.rank
        fixed = _find_fixed_alpha(recipe_data.get("backend"))
        if self.has_adapters and fixed is not None:
            values["student.lora.alpha"] = fixed
        return values

    def describe(self) -> str:
        """Return the row and its source in one line."""
        kind = "adapters" if self.has_adapters else "all weights"
        source = self.setting.adapter_source if self.has_adapters else self.setting.source
        return f"{self.setting.title}, {kind} ({self.size}; {source})"


def choose_setting(recipe_data: Mapping[str, Any]) -> SettingChoice | None:
    """Return the row for the student of a recipe's data; None if the recipe names no student."""
    student = recipe_data.get("student")
    if not isinstance(student, Mapping) or not isinstance(student.get("model"), str | Mapping):
        return None
    has_adapters = isinstance(student.get("lora"), Mapping)
    on_cpu = _is_on_cpu(student.get("device", "auto"))
    model = student["model"]
    scratch = next(row for row in SETTINGS if row.parameters is None)
    if isinstance(model, Mapping):
        return SettingChoice(scratch, has_adapters, on_cpu, "from scratch")
    pretrained = [row for row in SETTINGS if row.parameters is not None]
    parameters, size = _find_size(model, Path(str(recipe_data.get("base_dir", "."))))
    fitting = (row for row in pretrained if parameters and parameters <= (row.parameters or 0))
    row = next(fitting, pretrained[-1])
    if isinstance(student.get("drafter"), Mapping):
        # A drafter is made from scratch, and its target does not learn.
        row = replace(row, parameters=None, learning_rate=scratch.learning_rate)
    return SettingChoice(row, has_adapters, on_cpu, size)


def fill_setting(recipe_data: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the values of the student's row that a recipe's data does not set."""
    choice = choose_setting(recipe_data)
    filled = dict(recipe_data)
    if choice is None:
        return filled
    for path, number in choice.list_missing(recipe_data).items():
        _fill(filled, path.split("."), number)
    return filled


def _fill(section: dict[str, Any], path: Sequence[str], number: float) -> None:
    """Set a number if it is missing; validation reports a section that is not a mapping."""
    key, *inner = path
    if not inner:
        section.setdefault(key, number)
    elif isinstance(section.get(key, {}), Mapping):
        section[key] = dict(section.get(key, {}))
        _fill(section[key], inner, number)


def find_setting_file(name: str, folder: Path) -> Path | None:
    """Return the file of a pair by its packaged name, or by its path from a recipe's folder."""
    for file in (folder / name, locate_packaged_recipes() / SETTINGS_FOLDER / f"{name}.yaml"):
        if file.suffix == ".yaml" and file.is_file():
            return file
    return None


def list_setting_names() -> list[str]:
    """Return the names of the packaged pairs."""
    folder = locate_packaged_recipes() / SETTINGS_FOLDER
    return sorted(path.stem for path in folder.glob("*.yaml"))


def _find_fixed_alpha(backend: Any) -> float | None:
    """Return the alpha of all adapters at a backend; None if the recipe chooses it."""
    kind = backend.get("type") if isinstance(backend, Mapping) else backend
    if kind not in list_plugins("backends"):
        return None
    return load_plugin("backends", kind).Config.adapter_alpha


def _is_on_cpu(device: Any) -> bool:
    return device == "cpu" or (device != "cuda" and not torch.cuda.is_available())


def _find_size(model: str, folder: Path) -> tuple[int | None, str]:
    """Return the parameters of a model, or of the student of a run, and how they were found."""
    for place in (folder / Path(model).expanduser(), Path(model).expanduser()):
        run = RunDir(place)
        stages = sorted(path.parent for path in run.stages.glob("*/recipe.json"))
        if stages:
            return _find_size(str(stages[-1]), folder)
        if run.recipe_json.is_file():
            student = _read_student(run)
            inside = run.models / "student" if isinstance(student, Mapping) else Path(str(student))
            return count_parameters(str(inside), folder)
    return count_parameters(model, folder)


def _read_student(run: RunDir) -> Any:
    """Return the student's model in a saved recipe; an empty text if the file cannot be read."""
    try:
        return json.loads(run.recipe_json.read_text(encoding="utf-8"))["recipe"]["student"]["model"]
    # A damaged run is refused where its student is loaded, with the reason.
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
