"""Strict reading of rows: each object is accepted, or rejected with a reason."""

from typing import Any

from practicum.core.strict_json import JsonError, parse_json


class Rejected(Exception):
    """The reason why a row cannot be used."""


def parse_line(line: bytes, largest: int) -> dict[str, Any] | Rejected:
    """Return the object in a line of JSON Lines, or the reason why it has no object."""
    if len(line) > largest:
        return Rejected(
            f"larger than {largest} bytes; raise task.max_row_bytes if it is meant to be"
        )
    try:
        return require_object(parse_json(line))
    except JsonError as error:
        return require_object(error)


def require_object(parsed: Any) -> dict[str, Any] | Rejected:
    """Return a parsed value if it is an object, or the reason why it cannot be a row."""
    if isinstance(parsed, JsonError):
        return Rejected(f"not JSON ({parsed})")
    if not isinstance(parsed, dict):
        reason = f"not an object but of type {type(parsed).__name__}"
        return Rejected(f"{reason}; write one JSON object a row")
    return parsed


def check_text(text: str, name: str) -> str:
    """Return the text; Rejected if it has a NUL character or half of a surrogate pair."""
    if "\x00" in text:
        raise Rejected(f"{name} contains a NUL character")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise Rejected(f"{name} contains half of a surrogate pair")
    return text


def parse_text(text: str, name: str) -> Any:
    """Return the JSON value that a text holds; Rejected if it holds none."""
    try:
        return parse_json(text)
    except JsonError as error:
        raise Rejected(f"{name} is not JSON ({error})") from None
