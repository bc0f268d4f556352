"""`key.sub=value`, as it is given on the command line."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from practicum.errors import RecipeError
from practicum.objective import Objective, Term
from practicum.recipe.files import StrictLoader
from practicum.recipe.schema import Recipe


def override(data: dict[str, Any], text: str) -> None:
    """Apply one `key.sub=value` to a recipe's data; RecipeError where it is not one."""
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise RecipeError(f"override {text!r} is not key=value; write for example train.steps=4")
    *parents, last = key.split(".")
    place = data
    for number, name in enumerate(parents):
        if isinstance(place.get(name), list):
            return _override_item(place[name], [*parents[number + 1 :], last], value, text)
        if place.get(name) is None:
            place[name] = {}
        if not isinstance(place[name], dict):
            whole = ".".join(parents[: number + 1])
            *outer, inner = [*parents[number + 1 :], last]
            within = (
                "".join(f"{{{key}: " for key in outer)
                + f"{{{inner}: {value}, ...}}"
                + "}" * len(outer)
            )
            raise RecipeError(
                f"override {text!r}: {whole} is {place[name]!r}, which has no keys; write the whole of it, {whole}={within}"
            )
        place = place[name]
    place[last] = _parsed(value)


def _override_item(items: list[Any], path: list[str], value: str, text: str) -> None:
    """Set a value within one item of a list, `objective.losses.0.coefficient=2`."""
    place, *rest = path
    if not place.isdigit() or int(place) >= len(items):
        raise RecipeError(
            f"override {text!r}: the list has {len(items)} items; number one from 0, as in losses.0.coefficient=2"
        )
    if not rest:
        items[int(place)] = _parsed(value)
        return
    inner = items[int(place)]
    if not isinstance(inner, dict):
        raise RecipeError(f"override {text!r}: item {place} has no keys; write the whole item")
    override(inner, f"{'.'.join(rest)}={value}")


def _parsed(value: str) -> Any:
    try:
        return yaml.load(value, StrictLoader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return value


def resolve_path(text: str, data: Mapping[str, Any]) -> str:
    """An override with the place of a key that only a term has: `divergence=jsd(0.3)` is `objective.divergence=...`."""
    first = text.partition("=")[0].partition(".")[0]
    if first in Recipe.model_fields or first not in {*Term.model_fields, *Objective.model_fields}:
        return text
    losses = (
        data.get("objective", {}).get("losses") if isinstance(data.get("objective"), dict) else None
    )
    if losses is None or first in Objective.model_fields:
        return f"objective.{text}"
    if len(losses) > 1:
        raise RecipeError(
            f"override {text!r}: the objective has {len(losses)} terms; write objective.losses.0.{text} for the first"
        )
    return f"objective.losses.0.{text}"


def is_named(overrides: Sequence[str]) -> bool:
    """Return whether one of the overrides is the name of the recipe."""
    return any(text.partition("=")[0] == "name" for text in overrides)
