"""Find where each value of a recipe comes from: an override, a file, a setting, the table or a default."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from practicum.recipe.controls import remove_switch
from practicum.recipe.layers import RecipeLayer, fit_layers, merge_layers, read_layers
from practicum.recipe.loader import put_term_in_list
from practicum.recipe.overrides import override_all, resolve_path
from practicum.recipe.settings import SettingChoice, choose_setting
from practicum.recipe.short_forms import expand_models
from practicum.recipe.yaml_files import find_recipe

OVERRIDE, DEFAULT = "the command line", "default"


@dataclass(frozen=True, slots=True)
class Origins:
    """The layers of a recipe, the paths that overrides set, and the row of the table of settings.

    `recipe_data` is the recipe from its files and overrides. `left_out` names a setting if its
    numbers were left out because the recipe has another student.
    """

    layers: Sequence[RecipeLayer]
    overridden: Sequence[str]
    recipe_data: Mapping[str, Any]
    choice: SettingChoice | None
    left_out: str

    def find(self, path: str) -> str:
        """Return the origin of the value at a path of the resolved recipe."""
        if any(f"{path}.".startswith(f"{key}.") for key in self.overridden):
            return OVERRIDE
        named = [layer.origin for layer in self.layers if _names(layer.sections, path)]
        if named:
            return named[-1]
        if self.choice is not None and path in self.list_from_table():
            return f"the table of settings: {self.choice.describe()}"
        return DEFAULT

    def narrow(self, stage: str) -> "Origins":
        """Return the origins of one stage of a pipeline."""
        stage_layers = [
            RecipeLayer(f"{layer.origin}: stage {stage}", put_term_in_list(entry))
            for layer in self.layers
            for entry in layer.sections.get("stages", ())
            if entry.get("name") == stage
        ]
        return replace(self, layers=[*self.layers, *stage_layers])

    def list_from_table(self) -> dict[str, float]:
        """Return the values that come from the table of settings."""
        values = {} if self.choice is None else self.choice.list_missing(self.recipe_data)
        return {path: value for path, value in values.items() if not _names(self.recipe_data, path)}

    def describe_setting(self) -> list[str]:
        """Return lines that name the setting, the row of the table, and the values taken from it."""
        settings = [layer.origin for layer in self.layers if layer.is_setting]
        lines = [f"models and task: {' and '.join(settings)}"] if settings else []
        if self.left_out:
            lines.append(f"left out, as they fit another student: the numbers of {self.left_out}")
        values = self.list_from_table()
        if self.choice is not None and values:
            listed = ", ".join(f"{path}={value:g}" for path, value in values.items())
            lines.append(f"from the table of settings, {self.choice.describe()}: {listed}")
        return lines


def trace_origins(source: str | Path, overrides: Sequence[str] = ()) -> Origins:
    """Return the origins of a recipe's values; RecipeError as for `load_recipe`."""
    overrides, _ = remove_switch(overrides)
    read = read_layers(find_recipe(source))
    layers = fit_layers(read, overrides)
    recipe_data = merge_layers(layers)
    general = [text for text in overrides if not text.startswith("stages.")]
    override_all(recipe_data, general)
    recipe_data = expand_models(recipe_data)
    dropped = [
        before.origin
        for before, after in zip(read, layers, strict=True)
        if before.is_setting and before.sections.keys() != after.sections.keys()
    ]
    return Origins(
        [
            RecipeLayer(layer.origin, put_term_in_list(layer.sections), is_setting=layer.is_setting)
            for layer in layers
        ],
        [resolve_path(text, put_term_in_list(recipe_data)).partition("=")[0] for text in general],
        recipe_data,
        choose_setting(recipe_data),
        " and ".join(dropped),
    )


def list_paths(recipe_data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of a resolved recipe; a list counts as one value, except for loss
    terms."""
    if isinstance(recipe_data, Mapping) and recipe_data:
        for key, inner in recipe_data.items():
            yield from list_paths(inner, f"{prefix}.{key}" if prefix else key)
    elif prefix == "objective.losses":
        for index, term in enumerate(recipe_data):
            yield from list_paths(term, f"{prefix}.{index}")
    else:
        yield prefix, recipe_data


def _names(recipe_data: Any, path: str) -> bool:
    """Return True if it holds a path, or a text such as `jsd(0.5)` for a section that holds it."""
    for key in path.split("."):
        if isinstance(recipe_data, Mapping) and key in recipe_data:
            recipe_data = recipe_data[key]
        elif isinstance(recipe_data, list) and key.isdigit() and int(key) < len(recipe_data):
            recipe_data = recipe_data[int(key)]
        else:
            return isinstance(recipe_data, str)
    return True
