"""Overrides `key.sub=value` of the command line."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from practicum.errors import RecipeError
from practicum.models.packaged import PACKAGED
from practicum.objective import Objective, Term
from practicum.recipe.schema import Recipe
from practicum.recipe.yaml_files import parse_value

PATH_KEYS = ("path", "heldout", "model")
"""The keys of a recipe under which a file or folder is named."""


def override_all(recipe_data: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Apply overrides in their order, and return a line for each section that is reset.

    A change of its `type` resets a section, because its remaining keys belong to the previous type.
    Keys of the section that another override sets are kept. File paths are relative to the working
    directory, not to the recipe's folder. Raises RecipeError if an override cannot be applied.
    """
    notes, applied = [], []
    for text in overrides:
        text = resolve_path(text, recipe_data)
        dropped = override(recipe_data, text)
        section = text.partition("=")[0].removesuffix("type")
        beside = [
            earlier
            for earlier in applied
            if dropped and earlier.startswith(section) and not earlier.startswith(f"{section}type=")
        ]
        for earlier in beside:
            override(recipe_data, earlier)
        keys_beside = {
            earlier.removeprefix(section).partition("=")[0].split(".")[0] for earlier in beside
        }
        lost_keys = [key for key in dropped if key not in keys_beside]
        if lost_keys:
            notes.append(f"{text} resets {section[:-1]} and drops its {', '.join(lost_keys)}")
        applied.append(text)
    for text in applied:
        notes += _resolve_files(recipe_data, text.partition("=")[0].split("."))
    return notes


def _resolve_files(recipe_data: dict[str, Any], keys: Sequence[str]) -> list[str]:
    """Let the files that an override names start at the working directory, in place.

    If a file exists in the recipe's folder only, use that one and return a note. A text that names no
    file is not changed: it may be the name of a model.
    """
    section: Any = recipe_data
    for key in keys[:-1]:
        # Another override may have replaced the section, and loss terms name no files.
        section = section.get(key) if isinstance(section, dict) else None
    notes: list[str] = []
    if isinstance(section, dict) and keys[-1] in section:
        folder = Path(str(recipe_data.get("base_dir", ".")))
        section[keys[-1]] = _resolve_file(section[keys[-1]], keys[-1], folder, notes)
    return notes


def _resolve_file(entry: Any, key: str, folder: Path, notes: list[str]) -> Any:
    """Return an entry of a recipe with its files resolved, and add the notes about them."""
    if isinstance(entry, Mapping):
        return {name: _resolve_file(inner, name, folder, notes) for name, inner in entry.items()}
    if isinstance(entry, list):
        return [_resolve_file(inner, key, folder, notes) for inner in entry]
    if not isinstance(entry, str) or key not in PATH_KEYS or entry in PACKAGED:
        return entry
    path = Path(entry).expanduser()
    # `Path.exists` would raise OSError for a name that is too long.
    if not entry or path.is_absolute() or os.path.exists(path):
        return entry if key == "model" or not entry else str(path.absolute())
    if os.path.exists(folder / path):
        notes.append(f"{entry} is not in the working directory; it is {folder / path}")
        return str(folder / path)
    return entry


def override(recipe_data: dict[str, Any], text: str) -> list[str]:
    """Apply one `key.sub=value` to a recipe's data, and return the keys that a new `type` drops.

    Raises RecipeError if it cannot be applied.
    """
    key, equals, new_value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise RecipeError(f"override {text!r} is not key=value; use for example train.steps=4")
    if key.partition(".")[0] in ("setting", "extends"):
        raise RecipeError(
            f"override {text!r}: setting and extends are keys of a file; write one with both, such as "
            "extends: papers/gkd and setting: pair"
        )
    *parents, last = key.split(".")
    section = recipe_data
    for depth, name in enumerate(parents, start=1):
        keys_below = [*parents[depth:], last]
        if isinstance(section.get(name), list):
            return _override_item(section[name], keys_below, new_value, text)
        if section.get(name) is None:
            section[name] = {}
        if not isinstance(section[name], dict):
            path = ".".join(parents[:depth])
            *outer, inner = keys_below
            mapping = "".join(f"{{{key}: " for key in outer) + f"{{{inner}: {new_value}, ...}}"
            raise RecipeError(
                f"override {text!r}: {path} is {section[name]!r}, which has no keys; "
                f"write the whole of it, {path}={mapping}{'}' * len(outer)}"
            )
        section = section[name]
    value, dropped = parse_value(new_value), []
    if last == "type" and parents and section.get("type") != value:
        dropped = [key for key in section if key != "type"]
        section.clear()
    section[last] = value
    return dropped


def _override_item(items: list[Any], path: list[str], new_value: str, text: str) -> list[str]:
    """Set a value in an item of a list, as `objective.losses.0.coefficient=2` does."""
    index, *keys = path
    if not index.isdigit() or int(index) >= len(items):
        raise RecipeError(
            f"override {text!r}: the list has {len(items)} items; "
            "number one from 0, as in losses.0.coefficient=2"
        )
    if not keys:
        items[int(index)] = parse_value(new_value)
        return []
    item = items[int(index)]
    if not isinstance(item, dict):
        raise RecipeError(f"override {text!r}: item {index} has no keys; write the whole item")
    return override({index: item}, f"{'.'.join(path)}={new_value}")


def resolve_path(text: str, recipe_data: Mapping[str, Any]) -> str:
    """Return an override with the full path of a term's key.

    `divergence=jsd(0.3)` becomes `objective.divergence=jsd(0.3)`.
    """
    first = text.partition("=")[0].partition(".")[0]
    if first in Recipe.model_fields or first not in {*Term.model_fields, *Objective.model_fields}:
        return text
    objective = recipe_data.get("objective")
    losses = objective.get("losses") if isinstance(objective, dict) else None
    if losses is None or first in Objective.model_fields:
        return f"objective.{text}"
    if len(losses) > 1:
        raise RecipeError(
            f"override {text!r}: the objective has {len(losses)} terms; "
            f"write objective.losses.0.{text} for the first"
        )
    return f"objective.losses.0.{text}"


def is_named(overrides: Sequence[str]) -> bool:
    """Return True if one of the overrides sets the name of the recipe."""
    return any(text.partition("=")[0] == "name" for text in overrides)
