"""A strict reader for JSON from other programs: bounded sizes, no duplicate fields."""

import json
import math
from typing import Any

DEEPEST = 20
"""The most levels of nested lists and objects."""

MAX_DIGITS = 40
"""The most digits of an integer: seeds have up to 19."""

BLANKS = " \t\r\n"


class JsonError(ValueError):
    """The reason why a text is not strict JSON."""


class StrictDecoder:
    """A reader of consecutive JSON values in a text that reports violations of strict JSON.

    Its parser continues after a problem, so that the next value of a list is found. Lists and
    objects may be nested at most `deepest` levels.
    """

    def __init__(self, deepest: int = DEEPEST) -> None:
        self._deepest = deepest
        self._problems: list[str] = []
        self._decoder = json.JSONDecoder(
            object_pairs_hook=self._build_object,
            parse_constant=self._note_constant,
            parse_float=self._parse_float,
            parse_int=self._parse_int,
        )

    def decode_at(self, text: str, position: int) -> tuple[Any, int]:
        """Return the value at a position, or the JsonError about it, and the position after it.

        Raises JsonError if the end of the value cannot be found.
        """
        self._problems.clear()
        too_deep = f"nested deeper than {self._deepest}"
        try:
            parsed, end = self._decoder.raw_decode(text, position)
        except RecursionError:
            raise JsonError(too_deep) from None
        except ValueError as error:
            raise JsonError(str(error)) from None
        if _is_deeper(parsed, self._deepest):
            self._problems.append(too_deep)
        return (JsonError(self._problems[0]) if self._problems else parsed), end

    def _build_object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            self._problems.append(f"field {twice[:40]!a} stands twice")
        return fields

    def _note_constant(self, name: str) -> None:
        self._problems.append(f"{name} is not a number that JSON knows")

    def _parse_float(self, text: str) -> float:
        # Python reads 1e999 as infinity, which strict JSON cannot hold.
        number = float(text)
        if math.isinf(number):
            self._problems.append(f"{text[:20]} is too large for a number; write it as a text")
        return number

    def _parse_int(self, text: str) -> int:
        # The time to read a whole number grows with the square of its digits.
        if len(text) <= MAX_DIGITS:
            return int(text)
        self._problems.append(f"{text[:20]}... has {len(text)} digits; write it as a text")
        return 0


def parse_json(text: str | bytes, deepest: int = DEEPEST) -> Any:
    """Return the JSON value that a text holds; raises JsonError if it is not strict JSON."""
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise JsonError(f"not UTF-8 (byte {error.start})") from None
    text = text.strip(BLANKS)
    parsed, end = StrictDecoder(deepest).decode_at(text, 0)
    if isinstance(parsed, JsonError):
        raise parsed
    if end < len(text):
        raise JsonError(f"more text follows the value, at character {end + 1}")
    return parsed


def _is_deeper(parsed: Any, deepest: int) -> bool:
    """Return True if lists and objects are nested deeper than a number of levels."""
    level = [parsed] if isinstance(parsed, dict | list) else []
    for _ in range(deepest):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
    return bool(level)
