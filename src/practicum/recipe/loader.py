"""Load recipes from files or data, and check that they are possible at every step."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from practicum.errors import RecipeError
from practicum.monitors import read_number
from practicum.recipe.controls import build_control, explain_no_control, remove_switch
from practicum.recipe.layers import read_recipe
from practicum.recipe.mistakes import validate_fields
from practicum.recipe.overrides import is_named, override_all
from practicum.recipe.possible import correct_for_engine, fill_engine
from practicum.recipe.schedule import (
    SCHEDULED,
    Adaptive,
    Staircase,
    compute_value,
    extract_schedules,
)
from practicum.recipe.schema import Recipe, resolve_recipe
from practicum.recipe.settings import fill_setting, list_setting_names
from practicum.recipe.short_forms import expand_models
from practicum.recipe.yaml_files import find_recipe

log = logging.getLogger(__name__)


def load_recipe(source: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe from a file or by its packaged name, with `key.sub=value` overrides.

    `teacher=off` and `teacher=free` return the recipe's controls (see `practicum.recipe.controls`)
    after all other overrides. Raises RecipeError with every problem.
    """
    overrides, switch = remove_switch(overrides)
    path = find_recipe(source)
    recipe_data = read_recipe(path, overrides)
    if "stages" in recipe_data:
        raise RecipeError(
            f"{source}: a pipeline, since it has stages; run it with practicum.run, "
            "or read it with practicum.runs.stages"
        )
    for note in override_all(recipe_data, overrides):
        log.info(f"{source}: {note}")
    _check_models(recipe_data, str(source))
    recipe_data.setdefault("name", path.stem)
    recipe = parse_recipe(recipe_data, str(source))
    if switch is None:
        return recipe
    control = build_control(recipe, switch.unlikely)
    if control is None:
        raise explain_no_control(str(source), switch.unlikely)
    return control.model_copy(update={"name": recipe.name}) if is_named(overrides) else control


def _check_models(recipe_data: Mapping[str, Any], source: str) -> None:
    """Raise RecipeError if a recipe has no student or task, as one that only extends a method."""
    missing = [f"`{key}`" for key in ("student", "task") if key not in recipe_data]
    if missing:
        raise RecipeError(
            f"{source}: no {' and no '.join(missing)}; name your own, or one of the pairs that methods "
            f"are tried on, such as setting: pair ({', '.join(list_setting_names())})"
        )


def parse_recipe(recipe_data: Mapping[str, Any], source: str) -> Recipe:
    """Validate a recipe's data. Raises RecipeError with a line per problem that names its field."""
    try:
        plain, schedules = extract_schedules(
            put_term_in_list(fill_setting(expand_models(recipe_data)))
        )
    except ValueError as error:
        raise RecipeError(f"{source}: {error}") from None
    if schedules:
        plain["schedules"] = {**recipe_data.get("schedules", {}), **schedules}
    recipe = validate_fields(Recipe, plain, source)
    rollout = fill_engine(recipe.rollout, recipe.student, recipe.backend.checkpoints_here)
    recipe = recipe.model_copy(update={"rollout": rollout})
    if recipe.rollout.engine is not None and recipe.rollout.engine.may_sample:
        recipe = recipe.model_copy(update={"objective": correct_for_engine(recipe.objective)})
    # Schedules are monotonic, so the first and the last step have their extremes; validating all
    # steps would take too long.
    for step in (1, (1 + recipe.train.steps) // 2, recipe.train.steps):
        _check_schedules(recipe, source, step)
    _check_changes(recipe, source)
    return recipe


def _check_schedules(recipe: Recipe, source: str, step: int) -> None:
    """Raise RecipeError if a schedule's number is impossible at a step, or replaces no number."""
    for path, schedule in recipe.schedules.items():
        ends = [schedule.end] if isinstance(schedule, Adaptive | Staircase) else []
        for number in [compute_value(schedule, step, recipe.train.steps), *ends]:
            try:
                recipe.replace_numbers({path: number})
            except (KeyError, IndexError, TypeError, AttributeError):
                raise RecipeError(
                    f"{source}: schedules: there is no number at {path!r}; "
                    "write the schedule in the number's place"
                ) from None


def _check_changes(recipe: Recipe, source: str) -> None:
    """Raise RecipeError if a monitor changes a path without a number, or a scheduled number."""
    recipe_data = resolve_recipe(recipe)
    for name, settings in recipe.monitors.items():
        for path in settings.set:
            where = f"{source}: monitors.{name}.set: "
            if path in recipe.schedules:
                raise RecipeError(f"{where}{path} has a schedule; let one of the two change it")
            try:
                if path.partition(".")[0] not in SCHEDULED:
                    raise KeyError(path)
                recipe.replace_numbers({path: read_number(recipe_data, path)})
            except (KeyError, IndexError, TypeError, ValueError, AttributeError):
                raise RecipeError(
                    f"{where}there is no number at {path!r}; write a place in "
                    f"{', '.join(SCHEDULED)}, for example optimizer.learning_rate"
                ) from None


def put_term_in_list(recipe_data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data with a single loss term moved into `losses`, so that paths have one form."""
    objective = recipe_data.get("objective")
    if not isinstance(objective, Mapping) or "losses" in objective:
        return dict(recipe_data)
    term = dict(objective)
    shared = {key: term.pop(key) for key in ("aggregate", "aggregate_norm") if key in term}
    return {**recipe_data, "objective": {**({"losses": [term]} if term else {}), **shared}}
