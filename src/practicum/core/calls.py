"""The call syntax of recipes: names with arguments, as in `topk(20, support=student)`."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, ConfigDict, model_serializer

from practicum.foreign import suggest_name as suggest_name

_CALL = re.compile(r"^\s*([A-Za-z_][A-Za-z0-9_.:]*)\s*(?:\((.*)\))?\s*$", re.DOTALL)


def parse_call(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Parse `'jsd(0.3)'` into `('jsd', [0.3], {})`; ValueError for any other text."""
    match = _CALL.match(text)
    if match is None:
        hint = ""
        if text.count("(") > text.count(")"):
            # Inside braces YAML ends a text at its first comma.
            hint = ", and a call with a comma in quotes if it stands within braces"
        raise ValueError(
            f"{text!r} is not a name with arguments; write for example 'jsd(0.3)'{hint}"
        )
    name, inside = match.groups()
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for part in filter(str.strip, _split_arguments(inside or "")):
        key, equals, value = part.partition("=")
        if equals and "(" not in key:
            if key.strip() in keywords:
                raise ValueError(f"{text!r} gives {key.strip()!r} twice")
            keywords[key.strip()] = _parse_scalar(value)
        elif keywords:
            raise ValueError(f"{text!r} has a positional argument after a named one")
        else:
            positional.append(_parse_scalar(part))
    return name, positional, keywords


def bind(name: str, value: Any, parameters: Sequence[str]) -> dict[str, Any]:
    """Return a call's arguments by parameter name; ValueError on too many or unknown ones."""
    call, positional, keywords = parse_call(value)
    if len(positional) > len(parameters):
        takes = f"takes {', '.join(parameters)}" if parameters else "takes no arguments"
        raise ValueError(f"{name} {call!r} {takes}, but {len(positional)} values were given")
    arguments = dict(zip(parameters, positional, strict=False))
    for key, argument in keywords.items():
        if key not in parameters:
            raise ValueError(
                f"{name} {call!r} has no parameter {key!r}; {suggest_name(key, parameters)}"
            )
        if key in arguments:
            raise ValueError(f"{name} {call!r} gives {key!r} twice")
        arguments[key] = argument
    return arguments


def format_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Return the text that `parse_call` reads back."""
    inside = ", ".join(f"{key}={value}" for key, value in arguments.items())
    return f"{name}({inside})" if inside else name


def _split_arguments(inside: str) -> list[str]:
    """Split the text between the brackets at its outermost commas: an argument may be a call."""
    parts, depth, start = [], 0, 0
    for index, letter in enumerate(inside):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append(inside[start:index])
            start = index + 1
    return [*parts, inside[start:]]


def _parse_scalar(text: str) -> Any:
    text = text.strip().strip("'\"")
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


class Call(BaseModel):
    """A choice written as a call: `type` is the name, other fields are the parameters in order."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @property
    def name(self) -> str:
        """Return the name that recipes use."""
        return str(type(self).model_fields["type"].default)

    def try_out(self) -> None:
        """Compute a minimal example. Parts of other packages are tried when a recipe is read.

        Raise ValueError, or any error of the part, if the part is wrong.
        """

    @model_serializer(mode="plain")
    def _as_text(self) -> str | dict[str, Any]:
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        arguments = {name: value for name, value in fields.items() if value is not None}
        mappings = {
            name: value.model_dump(mode="json")
            for name, value in arguments.items()
            if isinstance(value, BaseModel) and not isinstance(value, Call)
        }
        if mappings:  # a call cannot hold a mapping
            return arguments | mappings
        return format_call(arguments.pop("type"), arguments)
