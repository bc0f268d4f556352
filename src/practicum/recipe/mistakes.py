"""Validation errors as one line each, with a correction."""

import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from practicum.core.calls import suggest_name
from practicum.core.plugins import load_plugin
from practicum.errors import CapabilityError, RecipeError
from practicum.recipe.keys import find_key
from practicum.recipe.yaml_files import FILE_KEYS

Model = TypeVar("Model", bound=BaseModel)


def validate_fields(model: type[Model], fields: Mapping[str, Any], source: str) -> Model:
    """Validate the fields as a model.

    Raises RecipeError with one line per problem, or CapabilityError if all fields are valid and
    only their combination is not.
    """
    try:
        return model.model_validate(dict(fields))
    except ValidationError as error:
        entries = error.errors(include_url=False)
        # Validators of the whole model have no location; they check combinations.
        error_type = RecipeError if any(entry["loc"] for entry in entries) else CapabilityError
        raise error_type(
            [f"{source}: {_format_problem(entry, model, fields)}" for entry in entries]
        ) from None


def _format_problem(entry: Any, model: type[BaseModel], fields: Mapping[str, Any]) -> str:
    """Return a problem as one line: the field, the mistake, and a correction."""
    field = ".".join(str(part) for part in entry["loc"])
    message = entry["msg"].removeprefix("Value error, ")
    if entry["type"] == "extra_forbidden":
        names = _list_fields(model, entry["loc"][:-1], fields)
        names += FILE_KEYS if len(entry["loc"]) == 1 else ()
        full_key = find_key(field) if len(entry["loc"]) == 1 else None
        if full_key is not None:
            return f"{field}: no such key; use {full_key}"
        hint = f"; {suggest_name(str(entry['loc'][-1]), names)}" if names else ""
        return f"{field}: no such key{hint}"
    if entry["type"] == "string_pattern_mismatch":
        return (
            f"{field}: {entry['input']!r} cannot name a folder; "
            "use letters, digits, '.', '_' and '-', at most 80"
        )
    if entry["type"] == "string_type" and isinstance(entry["input"], bool):
        return f"{field}: YAML reads this value as {str(entry['input']).lower()}; quote a text: '\"true\"'"
    if entry["type"] == "missing":
        return f"{field}: missing; set it"
    if entry["type"] in ("value_error", "literal_error") and not field:
        return message
    wrong = entry["input"]
    # Our own validators (value_error) quote the input themselves, and a mapping would fill pages.
    is_scalar = isinstance(wrong, str | int | float | bool) and entry["type"] != "value_error"
    input_note = f" (given: {wrong!r})" if is_scalar else ""
    return f"{field}: {message[:1].lower() + message[1:]}{input_note}"


def _list_fields(root: type[BaseModel], loc: Sequence[int | str], section: Any) -> list[str]:
    """Return the field names of the model at a location of a validation error."""
    # A location has more parts than keys: for a union, pydantic adds the name of the member's
    # class.
    models = [root]
    for part in map(str, loc):
        section = section[part] if isinstance(section, Mapping) and part in section else section
        if isinstance(section, Mapping) and part in ("teacher", "task") and "type" in section:
            models = [load_plugin(f"{part}s", str(section["type"])).Config]
        elif any(model.__name__ == part for model in models):
            models = [model for model in models if model.__name__ == part]
        else:
            inner: list[type[BaseModel]] = []
            for model in models:
                if part in model.model_fields:
                    inner += _list_models(model.model_fields[part].annotation)
            models = inner or models
    return sorted({name for model in models for name in model.model_fields})


def _list_models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is not None:
        return [model for part in typing.get_args(annotation) for model in _list_models(part)]
    return []
