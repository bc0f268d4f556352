"""The call syntax of recipes: `jsd(0.3)` and `topk(20, support=student)` are names with arguments."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, model_serializer

_CALL = re.compile(r"^\s*([A-Za-z_][A-Za-z0-9_.]*)\s*(?:\((.*)\))?\s*$", re.DOTALL)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`no such thing` in one helpful clause: the nearest known name, where one is near, and all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}known: {', '.join(names)}"


def parse_call(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """`'jsd(0.3)'` to `('jsd', [0.3], {})`; ValueError on anything that is not a name with arguments."""
    match = _CALL.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a name with arguments; write for example 'jsd(0.3)'")
    name, inside = match.group(1), match.group(2)
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for part in _arguments(inside or ""):
        if not part.strip():
            continue
        key, equals, value = part.partition("=")
        if equals and "(" not in key:
            if key.strip() in keywords:
                raise ValueError(f"{text!r} gives {key.strip()!r} twice")
            keywords[key.strip()] = _scalar(value)
        elif keywords:
            raise ValueError(f"{text!r} has a positional argument after a named one")
        else:
            positional.append(_scalar(part))
    return name, positional, keywords


def bind(name: str, value: Any, parameters: Sequence[str]) -> dict[str, Any]:
    """The arguments of a call by parameter name; ValueError on too many or unknown ones."""
    call, positional, keywords = parse_call(value)
    if len(positional) > len(parameters):
        takes = f"takes {', '.join(parameters)}" if parameters else "takes no arguments"
        raise ValueError(f"{name} {call!r} {takes}, but {len(positional)} values were given")
    arguments = dict(
        zip(parameters, positional, strict=False)
    )  # fewer values than parameters is fine
    for key, argument in keywords.items():
        if key not in parameters:
            raise ValueError(
                f"{name} {call!r} has no parameter {key!r}; {did_you_mean(key, parameters)}"
            )
        if key in arguments:
            raise ValueError(f"{name} {call!r} gives {key!r} twice")
        arguments[key] = argument
    return arguments


def format_call(name: str, arguments: Mapping[str, Any]) -> str:
    """The text that `parse_call` reads back."""
    inside = ", ".join(f"{key}={value}" for key, value in arguments.items())
    return f"{name}({inside})" if inside else name


def _arguments(inside: str) -> list[str]:
    """The text between the brackets at its outermost commas, so that an argument may be a call itself."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(inside):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append(inside[start:place])
            start = place + 1
    return [*parts, inside[start:]]


def _scalar(text: str) -> Any:
    text = text.strip().strip("'\"")
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


class Call(BaseModel):
    """A choice that is written as a call; `type` is its name and the other fields its parameters, in order."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_serializer(mode="plain")
    def _as_text(self) -> str:
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return format_call(
            fields.pop("type"), {name: value for name, value in fields.items() if value is not None}
        )
