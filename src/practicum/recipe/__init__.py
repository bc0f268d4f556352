"""The recipe: the whole run as typed data, read from YAML with every mistake reported at once.

`schema` defines a recipe from `sections` and plug-ins, and `possible` lists combinations that
cannot work. `files` finds and reads YAML, `overrides` changes it, `controls` switches the teacher
off, and `reading` validates the result.
"""

from practicum.recipe.controls import (
    SECTIONS,
    SWITCH,
    describe_control,
    explain_no_control,
    build_control,
    remove_switch,
)
from practicum.recipe.files import (
    find_recipe,
    merge_recipes,
    locate_packaged_recipes,
    read_recipe,
    read_yaml,
    list_recipe_names,
)
from practicum.recipe.mistakes import validate_fields
from practicum.recipe.older import bring_up
from practicum.recipe.overrides import is_named, override, resolve_path
from practicum.recipe.possible import find_capability_problems, explain_clip, explain_staleness
from practicum.recipe.reading import load_recipe, parse_recipe
from practicum.recipe.schema import WORDS, Recipe, resolve_recipe
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
    "find_capability_problems",
    "explain_clip",
    "describe_control",
    "find_recipe",
    "is_named",
    "load_recipe",
    "merge_recipes",
    "explain_no_control",
    "override",
    "locate_packaged_recipes",
    "parse_recipe",
    "read_recipe",
    "read_yaml",
    "list_recipe_names",
    "resolve_path",
    "resolve_recipe",
    "explain_staleness",
    "build_control",
    "validate_fields",
    "remove_switch",
]
