"""The recipe: the whole run as typed data, read from YAML with every mistake reported at once.

`schema` defines a recipe from `sections` and plug-ins, and `possible` lists combinations that
cannot work. `files` finds and reads YAML, `overrides` changes it, `controls` switches the teacher
off, and `reading` validates the result.
"""

from practicum.core.packaged import list_recipe_names
from practicum.recipe.controls import (
    SECTIONS,
    SWITCH,
    TeacherSwitch,
    build_control,
    describe_control,
    explain_no_control,
    remove_switch,
)
from practicum.recipe.families import FAMILIES, Family
from practicum.recipe.layers import read_recipe
from practicum.recipe.loader import load_recipe, parse_recipe
from practicum.recipe.mistakes import validate_fields
from practicum.recipe.overrides import is_named, override, override_all
from practicum.recipe.possible import (
    explain_clip,
    explain_staleness,
    find_capability_problems,
    find_context_problems,
)
from practicum.recipe.schema import WORDS, Recipe, resolve_recipe
from practicum.recipe.sections import Prices, TrainConfig
from practicum.recipe.settings import choose_setting, fill_setting
from practicum.recipe.yaml_files import FILE_KEYS, find_recipe, merge_recipes

__all__ = [
    "FAMILIES",
    "FILE_KEYS",
    "SECTIONS",
    "SWITCH",
    "WORDS",
    "Family",
    "Prices",
    "Recipe",
    "TeacherSwitch",
    "TrainConfig",
    "build_control",
    "choose_setting",
    "describe_control",
    "explain_clip",
    "explain_no_control",
    "explain_staleness",
    "fill_setting",
    "find_capability_problems",
    "find_context_problems",
    "find_recipe",
    "is_named",
    "list_recipe_names",
    "load_recipe",
    "merge_recipes",
    "override",
    "override_all",
    "parse_recipe",
    "read_recipe",
    "remove_switch",
    "resolve_recipe",
    "validate_fields",
]
