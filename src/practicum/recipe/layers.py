"""Read a recipe file into layers: its setting, the method that it extends, and the file itself.

A *method* is everything in a file except its `setting`: objective, source, kind of teacher. A *setting* is the
pair of models and the task that it is tried on, with the rates, lengths and batches that fit them.
`extends` takes the method of a file and leaves out its setting and the words that describe it.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from practicum.core.packaged import find_base, name_recipe
from practicum.errors import RecipeError
from practicum.recipe.overrides import override_all
from practicum.recipe.schema import WORDS
from practicum.recipe.settings import SETTINGS_FOLDER, find_setting_file, list_setting_names
from practicum.recipe.short_forms import expand_models
from practicum.recipe.yaml_files import expand_file, expand_section, find_parent, merge_recipes

DEEPEST_EXTENDS = 8

NUMBERS = ("optimizer", "train", "rollout", "evaluation", "backend", "prompt_tokens")
"""The sections of a setting that only fit its own student."""


REPRODUCTION = ("paper", "claim", "differs", "formula", "reduced", "teacher_effect")
"""The words that are true only with the recipe's own setting."""


@dataclass(frozen=True, slots=True)
class RecipeLayer:
    """A part of a recipe's data, and the file that it comes from."""

    origin: str
    sections: Mapping[str, Any]
    is_setting: bool = False


def read_layers(path: Path, above: tuple[Path, ...] = ()) -> list[RecipeLayer]:
    """Return the layers of a recipe file, the first one under all others.

    `above` are the files that extend this one.
    """
    folder = find_base(path)
    recipe_data = expand_file(path)
    parent, setting = recipe_data.pop("extends", None), recipe_data.pop("setting", None)
    layers: list[RecipeLayer] = []
    if parent is not None:
        layers = _read_method(str(parent), path, above)
    if isinstance(stages := recipe_data.get("stages"), list):
        recipe_data["stages"] = [_extend_stage(stage, path, above) for stage in stages]
    if setting is not None:
        layers = [*_read_setting(setting, path), *layers]
    # The paths of a task are relative to the file with the task, even if another file extends it.
    if "task" in recipe_data:
        recipe_data.setdefault("base_dir", str(folder))
    return [*layers, RecipeLayer(_name(path), recipe_data)]


def _read_method(parent: str, path: Path, above: tuple[Path, ...]) -> list[RecipeLayer]:
    """Return the layers of the file that `path` extends, without its setting and its description."""
    file = find_parent(path, parent)
    if file in above or len(above) > DEEPEST_EXTENDS:
        raise RecipeError(f"{path}: extends {parent!r}, which extends this one again")
    return [
        replace(layer, sections=_drop_words(layer.sections))
        for layer in read_layers(file, (*above, path.resolve()))
        if not layer.is_setting
    ]


def _extend_stage(stage: Any, path: Path, above: tuple[Path, ...]) -> Any:
    """Return a pipeline's stage, merged over the method of the recipe that it `extends`."""
    if not isinstance(stage, Mapping) or "extends" not in stage:
        return stage
    entry = {key: section for key, section in stage.items() if key != "extends"}
    layers = _read_method(str(stage["extends"]), path, above)
    return merge_layers([*layers, RecipeLayer(_name(path), entry)])


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the data of a recipe file, merged over its setting and the method that it `extends`.

    `overrides` are not applied. If one of them names another student, the numbers of the setting are
    left out, because they only fit the setting's student.
    """
    recipe_data = merge_layers(fit_layers(read_layers(path), overrides))
    recipe_data.setdefault("base_dir", str(find_base(path)))
    return recipe_data


def merge_layers(layers: Sequence[RecipeLayer]) -> dict[str, Any]:
    """Merge the data of the layers, each over all earlier layers."""
    recipe_data: dict[str, Any] = {}
    for layer in layers:
        recipe_data = merge_recipes(recipe_data, copy.deepcopy(dict(layer.sections)))
    return recipe_data


def fit_layers(layers: Sequence[RecipeLayer], overrides: Sequence[str] = ()) -> list[RecipeLayer]:
    """Return the layers that fit the student named by the layers and the overrides.

    If this is not the setting's own student, the numbers of the setting and of the stages' settings
    are left out.
    """
    setting = merge_layers([layer for layer in layers if layer.is_setting])
    recipe_data = merge_layers(layers)
    # A pipeline's stages are not overridden here, and neither is a list that is missing yet.
    override_all(
        recipe_data, [text for text in overrides if text.startswith(("student.", "student="))]
    )
    fits = _fits(setting.get("student"), expand_models(recipe_data).get("student"))
    return [_choose_numbers(layer, fits=fits) for layer in layers]


def _fits(student: Any, chosen: Any) -> bool:
    """Return True if a setting's numbers fit the student that a recipe chooses."""
    if not isinstance(student, Mapping) or not isinstance(chosen, Mapping):
        return True
    # A from-scratch model keeps its setting if its sizes change, because sizes are often varied.
    if isinstance(chosen.get("model"), Mapping):
        return isinstance(student.get("model"), Mapping)
    has_adapters = [isinstance(section.get("lora"), Mapping) for section in (student, chosen)]
    return chosen.get("model") == student.get("model") and has_adapters[0] == has_adapters[1]


def _choose_numbers(layer: RecipeLayer, *, fits: bool) -> RecipeLayer:
    recipe_data = dict(layer.sections)
    if not fits:
        dropped = NUMBERS if layer.is_setting else REPRODUCTION
        recipe_data = {key: section for key, section in recipe_data.items() if key not in dropped}
    if isinstance(recipe_data.get("stages"), list):
        recipe_data["stages"] = [_join_setting(stage, fits=fits) for stage in recipe_data["stages"]]
    return replace(layer, sections=recipe_data)


def _join_setting(stage: Any, *, fits: bool) -> Any:
    """Return a stage with its own `setting` merged under it, or left out."""
    if not isinstance(stage, Mapping) or not isinstance(stage.get("setting"), Mapping):
        return stage
    entries = {key: section for key, section in stage.items() if key != "setting"}
    return merge_recipes(stage["setting"], entries) if fits else entries


def _drop_words(recipe_data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of an extended file without its words and the settings of its stages."""
    method = {key: section for key, section in recipe_data.items() if key not in WORDS}
    if isinstance(method.get("stages"), list):
        method["stages"] = [_join_setting(stage, fits=False) for stage in method["stages"]]
    return method


def _read_setting(setting: Any, path: Path) -> list[RecipeLayer]:
    """Return the layers of a `setting`: a name, a file or a mapping."""
    if isinstance(setting, str):
        return _read_pair(setting, path)
    if not isinstance(setting, Mapping):
        raise RecipeError(f"{path}: setting: write a name such as `pair`, or a mapping")
    entries = {key: section for key, section in setting.items() if key != "extends"}
    layers = _read_pair(str(setting["extends"]), path) if "extends" in setting else []
    if "task" in entries:
        entries.setdefault("base_dir", str(find_base(path)))
    entries = expand_section(entries, find_base(path))
    return [*layers, RecipeLayer(f"setting of {_name(path)}", entries, is_setting=True)]


def _read_pair(name: str, path: Path) -> list[RecipeLayer]:
    """Return the layers of a pair's own file, without its words."""
    file = find_setting_file(name, path.parent.resolve())
    if file is None:
        raise RecipeError(
            f"{path}: setting: no {name!r:.100}; it is neither a .yaml file, relative to "
            f"{path.parent.resolve()}, nor one of {', '.join(list_setting_names())}"
        )
    return [
        RecipeLayer(f"setting {layer.origin}", _drop_words(layer.sections), is_setting=True)
        for layer in read_layers(file)
    ]


def _name(path: Path) -> str:
    """Return the name of a packaged file, such as `papers/gkd`, or a path."""
    return (name_recipe(path) or str(path)).removeprefix(f"{SETTINGS_FOLDER}/")
