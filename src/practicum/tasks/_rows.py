"""Strict reading of rows: each row is accepted, or rejected with a reason."""

import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from practicum.types import Message, Prompt

DEEPEST = 20
FIELDS = ("id", "prompt", "messages", "answer", "response", "domain", "teacher", "privileged")
ROLES = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "human": "user",
    "gpt": "assistant",
}
"""The role of a turn by the name in a file; the last two are those of ShareGPT."""
WHOLE = 2**53
"""Up to this number each whole float is one integer, so it is written as one."""

_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*+"')
_BRACKETS = re.compile(r"[\[{}\]]")
_TURNS_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*['"](?:role|content|from|value)['"]\s*:""")


class Rejected(Exception):
    """The reason why a row cannot be used."""


class StrictDecoder:
    """A reader of JSON objects that refuses repeated fields, NaN and infinite numbers.

    Its parser goes on after them, so that in a list of objects the next one is found.
    """

    def __init__(self) -> None:
        self._problems: list[str] = []
        self._decoder = json.JSONDecoder(
            object_pairs_hook=self._build_object, parse_constant=self._note_constant
        )

    def decode_at(self, text: str, position: int) -> tuple[dict[str, Any] | Rejected, int]:
        """Return the object at a position, or the reason why it is none, and the position after it.

        ValueError if the text there is not JSON.
        """
        self._problems.clear()
        parsed, end = self._decoder.raw_decode(text, position)
        if self._problems:
            return Rejected(self._problems[0]), end
        if not isinstance(parsed, dict):
            reason = f"not an object but of type {type(parsed).__name__}"
            return Rejected(f"{reason}; write one JSON object a row"), end
        return parsed, end

    def _build_object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for name, value in pairs:
            if name in fields:
                self._problems.append(f"field {name!r} stands twice")
            fields[name] = value
        return fields

    def _note_constant(self, name: str) -> None:
        self._problems.append(f"{name} is not a number that JSON knows")


def parse_line(line: bytes, largest: int, decoder: StrictDecoder) -> dict[str, Any] | Rejected:
    """Return the object in a line of JSON Lines, or the reason why there is none."""
    if len(line) > largest:
        return Rejected(
            f"larger than {largest} bytes; raise task.max_row_bytes if it is meant to be"
        )
    try:
        text = line.decode("utf-8").strip(" \t\r\n")
    except UnicodeDecodeError as error:
        return Rejected(f"not UTF-8 (byte {error.start})")
    if "\x00" in text:
        return Rejected("contains a NUL byte")
    if measure_depth(text) > DEEPEST:
        return Rejected(f"nested deeper than {DEEPEST}")
    try:
        row, end = decoder.decode_at(text, 0)
    except ValueError as error:
        # Besides bad syntax, this is a number with more digits than Python converts.
        return Rejected(f"not JSON ({error})")
    if end < len(text):
        return Rejected(f"not JSON (more text follows the object, at character {end + 1})")
    return row


def measure_depth(text: str) -> int:
    """Return the depth of nested brackets, before the parser would recurse that deep."""
    depth = deepest = 0
    for bracket in _BRACKETS.findall(_STRINGS.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


def read_prompt(row: Mapping[str, Any], name: str) -> Prompt:
    """Return the prompt of a row of `FIELDS`, named `name` if it has no id.

    A field that is None is as if it were not there. Raises Rejected with the reason if the row
    cannot be used.
    """
    row = {field: value for field, value in row.items() if value is not None}
    identity = _get_label(row, "id")
    if identity is not None and not identity.strip():
        raise Rejected("id is empty; leave it out or give it a text")
    messages, last_answer = _parse_messages(row)
    response = _parse_response(row)
    if response is not None and last_answer is not None:
        raise Rejected("the last turn is the assistant's, and response is given; leave one out")
    return Prompt(
        id=identity or name,
        messages=messages,
        answer=_parse_answer(row),
        response=last_answer if response is None else response,
        domain=_get_label(row, "domain"),
        teacher=_get_text(row, "teacher"),
        privileged=_parse_privileged(row),
    )


def _check_text(text: str, name: str) -> str:
    if "\x00" in text:
        raise Rejected(f"{name} contains a NUL character")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise Rejected(f"{name} contains half of a surrogate pair")
    return text


def _get_text(row: Mapping[str, Any], name: str) -> str | None:
    value = row.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise Rejected(f"{name} is of type {type(value).__name__}, not a text")
    return _check_text(value, name)


def _get_label(row: Mapping[str, Any], name: str) -> str | None:
    """Return a text or an integer as a text; tables number their rows and classes."""
    value = row.get(name)
    return str(value) if type(value) is int else _get_text(row, name)


def _parse_messages(row: Mapping[str, Any]) -> tuple[tuple[Message, ...], str | None]:
    """Return the turns up to the user's last one, and the assistant's answer to it, if any."""
    if ("prompt" in row) == ("messages" in row):
        raise Rejected("give either prompt or messages" + (", not both" if "prompt" in row else ""))
    field = "prompt" if "prompt" in row else "messages"
    if field == "prompt" and not isinstance(row["prompt"], list):
        return (Message("user", _parse_question(row)),), None
    messages = _parse_turns(row[field], field)
    _check_order(messages)
    if messages[-1].role == "assistant":
        return messages[:-1], messages[-1].content
    return messages, None


def _parse_question(row: Mapping[str, Any]) -> str:
    prompt = _get_text(row, "prompt")
    if not prompt or not prompt.strip():
        raise Rejected("prompt is empty")
    # Tables of texts, such as CSV, get turns as the text that Python or JSON writes for them.
    if _TURNS_AS_TEXT.match(prompt):
        raise Rejected(
            "prompt is a text that holds a list of turns; write the rows as JSON Lines or Parquet"
        )
    return prompt


def _parse_turns(turns: Any, field: str) -> tuple[Message, ...]:
    if not isinstance(turns, list) or not turns:
        raise Rejected(f"{field} is not a list of turns")
    return tuple(_parse_turn(turn, f"{field}[{number}]") for number, turn in enumerate(turns))


def _parse_turn(turn: Any, name: str) -> Message:
    """Return a turn of role and content, or of from and value; its other keys are not read."""
    for role_key, text_key in (("role", "content"), ("from", "value")):
        if isinstance(turn, dict) and role_key in turn and text_key in turn:
            break
    else:
        raise Rejected(f"{name} is not an object with role and content")
    role, text = turn[role_key], turn[text_key]
    if not isinstance(role, str) or role not in ROLES:
        raise Rejected(f"{name}.{role_key} is {str(role)[:40]!r}; known: {', '.join(ROLES)}")
    if not isinstance(text, str):
        raise Rejected(f"{name}.{text_key} is not a text")
    return Message(ROLES[role], _check_text(text, f"{name}.{text_key}"))


def _check_order(messages: tuple[Message, ...]) -> None:
    turns = [message.role for message in messages if message.role != "system"]
    if any(message.role == "system" for message in messages[1:]):
        raise Rejected("a system turn stands after another turn; put it first")
    if not turns or turns != [("user", "assistant")[n % 2] for n in range(len(turns))]:
        raise Rejected("user and assistant turns do not alternate, beginning with user")
    if not messages[-1].content.strip():
        raise Rejected("the last turn is empty")


def _parse_response(row: Mapping[str, Any]) -> str | None:
    """Return the worked answer: a text, or a list of one turn of the assistant."""
    if not isinstance(row.get("response"), list):
        return _get_text(row, "response")
    turns = _parse_turns(row["response"], "response")
    if [turn.role for turn in turns] != ["assistant"]:
        raise Rejected("response is not one turn of the assistant")
    return turns[0].content


def _parse_answer(row: Mapping[str, Any]) -> str | None:
    answer = row.get("answer")
    if answer is None:
        return None
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | Decimal):
        raise Rejected(f"answer is of type {type(answer).__name__}, not a text or a number")
    if isinstance(answer, float | Decimal) and not math.isfinite(answer):
        raise Rejected(f"answer is {answer}, which is no number; write it as a text")
    text = _check_text(_write_number(answer), "answer")
    if not text.strip():
        raise Rejected("answer is empty; leave it out where there is none")
    return text


def _write_number(answer: str | int | float | Decimal) -> str:
    """Return an answer as a text: a table that lacks some integers holds 42 as 42.0."""
    is_whole = isinstance(answer, float) and answer.is_integer() and abs(answer) <= WHOLE
    return str(int(answer) if is_whole else answer)


def _parse_privileged(row: Mapping[str, Any]) -> dict[str, str]:
    fields = row.get("privileged", {})
    if not isinstance(fields, dict) or not all(isinstance(value, str) for value in fields.values()):
        raise Rejected("privileged is not an object of texts")
    return {
        _check_text(name, "privileged"): _check_text(value, f"privileged.{name}")
        for name, value in fields.items()
    }
