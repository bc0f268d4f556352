"""From a file, or from data, to a recipe that is known to be possible at every step."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from practicum.errors import RecipeError
from practicum.monitors import number_at
from practicum.recipe.controls import no_control, teacher_off, without_switch
from practicum.recipe.files import find_recipe, read_recipe
from practicum.recipe.mistakes import validated
from practicum.recipe.overrides import is_named, override, resolve_path
from practicum.recipe.schedule import SCHEDULED, Adaptive, compute_value, extract_schedules
from practicum.recipe.schema import Recipe, resolved


def load_recipe(source: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe from a file or by its packaged name, with `key.sub=value` overrides.

    `teacher=off` makes it its control after all others, see `practicum.recipe.teacher_off`. Raises RecipeError with every problem
    found.
    """
    overrides, off = without_switch(overrides)
    path = find_recipe(source)
    data = read_recipe(path)
    if "stages" in data:
        raise RecipeError(
            f"{source}: a pipeline, since it has stages; run it with practicum.run, or read it with practicum.runs.pipeline"
        )
    for text in overrides:
        override(data, resolve_path(text, data))
    data.setdefault("name", path.stem)
    recipe = parse_recipe(data, str(source))
    if not off:
        return recipe
    control = teacher_off(recipe)
    if control is None:
        raise no_control(str(source))
    return control.model_copy(update={"name": recipe.name}) if is_named(overrides) else control


def parse_recipe(data: Mapping[str, Any], source: str) -> Recipe:
    """Validate a recipe's data; RecipeError with one line a problem, each naming its field."""
    try:
        plain, schedules = extract_schedules(_with_losses(data))
    except ValueError as error:
        raise RecipeError(f"{source}: {error}") from None
    if schedules:
        plain["schedules"] = {**data.get("schedules", {}), **schedules}
    recipe = validated(Recipe, plain, source)
    for step in (1, (1 + recipe.train.steps) // 2, recipe.train.steps):
        _check_schedules(recipe, source, step)
    _check_changes(recipe, source)
    return recipe


def _check_schedules(recipe: Recipe, source: str, step: int) -> None:
    """RecipeError where a schedule's number would be impossible at a step, or stands for nothing."""
    for path, schedule in recipe.schedules.items():
        ends = [schedule.end] if isinstance(schedule, Adaptive) else []
        for number in [compute_value(schedule, step, recipe.train.steps), *ends]:
            try:
                recipe.at({path: number})
            except (KeyError, IndexError, TypeError, AttributeError):
                raise RecipeError(
                    f"{source}: schedules: there is no number at {path!r}; write the schedule in the number's place"
                ) from None


def _check_changes(recipe: Recipe, source: str) -> None:
    """RecipeError where a monitor is to change what is no number, or a number that a schedule moves."""
    data = resolved(recipe)
    for name, settings in recipe.monitors.items():
        for path in settings.set:
            where = f"{source}: monitors.{name}.set: "
            if path in recipe.schedules:
                raise RecipeError(f"{where}{path} has a schedule; let one of the two change it")
            try:
                if path.partition(".")[0] not in SCHEDULED:
                    raise KeyError(path)
                recipe.at({path: number_at(data, path)})
            except (KeyError, IndexError, TypeError, ValueError, AttributeError):
                raise RecipeError(
                    f"{where}there is no number at {path!r}; write a place in {', '.join(SCHEDULED)}, for example "
                    "optimizer.learning_rate"
                ) from None


def _with_losses(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data with the objective's one term in a list, so that its numbers have one place whichever way it is written."""
    objective = data.get("objective")
    if not isinstance(objective, Mapping) or "losses" in objective:
        return dict(data)
    whole = {key: objective[key] for key in ("aggregate", "aggregate_norm") if key in objective}
    term = {key: value for key, value in objective.items() if key not in whole}
    return {**data, "objective": {**({"losses": [term]} if term else {}), **whole}}
