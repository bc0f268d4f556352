"""Data against the schema: every mistake in it as one line, with what to write instead."""

import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from practicum.core.calls import did_you_mean
from practicum.core.plugins import module_of
from practicum.errors import CapabilityError, RecipeError
from practicum.recipe.older import MOVED

Model = TypeVar("Model", bound=BaseModel)


def validated(model: type[Model], data: Mapping[str, Any], source: str) -> Model:
    """The data as the model; RecipeError, or CapabilityError where only parts do not go together, with one line a problem."""
    try:
        return model.model_validate(dict(data))
    except ValidationError as error:
        kind = CapabilityError if all(not entry["loc"] for entry in error.errors()) else RecipeError
        raise kind(
            [f"{source}: {_line(entry, model, data)}" for entry in error.errors(include_url=False)]
        ) from None


def _line(entry: Any, model: type[BaseModel], data: Mapping[str, Any]) -> str:
    """One problem as one line: the field, what is wrong, and what to write."""
    field = ".".join(str(part) for part in entry["loc"])
    message = entry["msg"].removeprefix("Value error, ")
    if entry["type"] == "extra_forbidden" and field in MOVED:
        return f"{field}: no such key any more; write {MOVED[field]}"
    if entry["type"] == "extra_forbidden":
        known = _known_fields(model, entry["loc"][:-1], data)
        hint = f"; {did_you_mean(str(entry['loc'][-1]), known)}" if known else ""
        return f"{field}: no such key{hint}"
    if entry["type"] == "string_pattern_mismatch":
        return f"{field}: {entry['input']!r} cannot name a folder; write letters, digits, '.', '_' and '-', at most 80"
    if entry["type"] == "missing":
        return f"{field}: missing; write it"
    if entry["type"] in ("value_error", "literal_error") and not field:
        return message
    given = entry["input"]
    shown = (
        f" (given: {given!r})"
        if isinstance(given, str | int | float | bool) and entry["type"] != "value_error"
        else ""
    )
    return f"{field}: {message[:1].lower() + message[1:]}{shown}"


def _known_fields(root: type[BaseModel], loc: Sequence[int | str], data: Any) -> list[str]:
    """The field names of the model at a place in the recipe."""
    models = [root]
    for part in loc:
        data = data[part] if isinstance(data, Mapping) and part in data else data
        if isinstance(data, Mapping) and part in ("teacher", "task") and "type" in data:
            models = [module_of(f"{part}s", str(data["type"])).Config]
        elif any(model.__name__ == part for model in models):
            models = [model for model in models if model.__name__ == part]
        else:
            annotations = [
                model.model_fields[str(part)].annotation
                for model in models
                if str(part) in model.model_fields
            ]
            models = [
                model for annotation in annotations for model in _models_in(annotation)
            ] or models
    return sorted({name for model in models for name in model.model_fields})


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is not None:
        return [model for part in typing.get_args(annotation) for model in _models_in(part)]
    return []
