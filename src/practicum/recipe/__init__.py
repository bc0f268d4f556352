"""The recipe: the whole run as typed data, read from YAML with every mistake reported at once.

`schema` defines a recipe from `sections` and plug-ins, and `possible` lists combinations that
cannot work. `files` finds and reads YAML, `overrides` changes it, `controls` switches the teacher
off, and `reading` validates the result.
"""

from practicum.recipe.controls import (
    SECTIONS,
    SWITCH,
    control_words,
    no_control,
    teacher_off,
    without_switch,
)
from practicum.recipe.files import (
    find_recipe,
    merged,
    packaged_recipes,
    read_recipe,
    read_yaml,
    recipe_names,
)
from practicum.recipe.mistakes import validated
from practicum.recipe.older import bring_up
from practicum.recipe.overrides import is_named, override, resolve_path
from practicum.recipe.possible import capability_problems, clip_warning, staleness_warning
from practicum.recipe.reading import load_recipe, parse_recipe
from practicum.recipe.schema import WORDS, Recipe, resolved
from practicum.recipe.sections import Budget, Prices, TrainConfig

__all__ = [
    "SECTIONS",
    "SWITCH",
    "WORDS",
    "Budget",
    "Prices",
    "Recipe",
    "TrainConfig",
    "bring_up",
    "capability_problems",
    "clip_warning",
    "control_words",
    "find_recipe",
    "is_named",
    "load_recipe",
    "merged",
    "no_control",
    "override",
    "packaged_recipes",
    "parse_recipe",
    "read_recipe",
    "read_yaml",
    "recipe_names",
    "resolve_path",
    "resolved",
    "staleness_warning",
    "teacher_off",
    "validated",
    "without_switch",
]
