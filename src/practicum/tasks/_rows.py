"""Strict reading of JSONL rows: each row is accepted, or rejected with its number and a reason."""

import json
import math
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from practicum.core.calls import suggest_name
from practicum.errors import DataError
from practicum.types import Message, Prompt

HOPELESS_ROW = 1 << 26
"""Bytes that no row has: a longer line shows that the file is something else than JSONL."""
DEEPEST = 20
FIELDS = ("id", "prompt", "messages", "answer", "response", "domain", "teacher", "privileged")
CHUNK = 1 << 16
ARCHIVES = {
    b"\x1f\x8b": "a gzip",
    b"PK\x03\x04": "a zip",
    b"BZh": "a bzip2",
    b"\xfd7zXZ": "an xz",
    b"\x28\xb5\x2f\xfd": "a zstd",
    b"PAR1": "a parquet",
    b"ARROW1": "an arrow",
}
ROLES = ("system", "user", "assistant")

_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*+"')
_BRACKETS = re.compile(r"[\[{}\]]")


class Rejected(Exception):
    """The reason why a row cannot be used."""


def read_lines(path: Path, largest: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a regular file with their numbers, without blank ones.

    A line of more than `largest` bytes is cut one byte past them, so that no row can fill the
    memory. DataError if the file is not a regular one or cannot be read.
    """
    try:
        kind = path.stat().st_mode
        # A named pipe would block the run for ever, and a device would never end.
        if not stat.S_ISREG(kind):
            what = "a folder" if stat.S_ISDIR(kind) else "not a regular file"
            raise DataError(f"{path} is {what}; give a JSONL file")
        with path.open("rb") as file:
            for number, line in enumerate(_read_bounded(path, file, largest), start=1):
                # Editors of Windows put a byte order mark at the start of a file.
                text = (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).rstrip(b"\r\n")
                if number == 1:
                    _refuse_archive(path, line)
                if text.strip():
                    yield number, text
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}); check the path, which starts at the "
            "recipe's folder"
        ) from error


def _refuse_archive(path: Path, start: bytes) -> None:
    for magic, what in ARCHIVES.items():
        if start.startswith(magic):
            raise DataError(f"{path} is {what} file, which is not read; unpack it to JSONL first")


def _read_bounded(path: Path, file: BinaryIO, largest: int) -> Iterator[bytes]:
    while line := file.readline(largest + 1):
        length = len(line)
        chunk = line
        while not chunk.endswith(b"\n") and (chunk := file.readline(CHUNK)):
            length += len(chunk)
            if length > HOPELESS_ROW:
                raise DataError(
                    f"{path} has a row of over {HOPELESS_ROW >> 20} MiB; give a JSONL file, one "
                    "object a line"
                )
        yield line


def read_prompt(line: bytes, name: str, largest: int) -> Prompt:
    """Parse one row, named `name` if it has no id; raise Rejected with the reason if it is bad."""
    if len(line) > largest:
        raise Rejected(
            f"larger than {largest} bytes; raise task.max_row_bytes if it is meant to be"
        )
    row = _parse_row(line)
    for field in row:
        if field not in FIELDS:
            raise Rejected(f"unknown field {field!r}; {suggest_name(field, FIELDS)}")
    identity = _get_text(row, "id")
    if identity is not None and not identity.strip():
        raise Rejected("id is empty; leave it out or give it a text")
    return Prompt(
        id=identity or name,
        messages=_parse_messages(row),
        answer=_parse_answer(row),
        response=_get_text(row, "response"),
        domain=_get_text(row, "domain"),
        teacher=_get_text(row, "teacher"),
        privileged=_parse_privileged(row),
    )


def _parse_row(line: bytes) -> dict[str, Any]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Rejected(f"not UTF-8 (byte {error.start})") from error
    if "\x00" in text:
        raise Rejected("contains a NUL byte")
    if _measure_depth(text) > DEEPEST:
        raise Rejected(f"nested deeper than {DEEPEST}")
    try:
        row = json.loads(text, object_pairs_hook=_build_row, parse_constant=_reject_constant)
    except ValueError as error:
        # Besides bad syntax, this is a number with more digits than Python converts.
        raise Rejected(f"not JSON ({error})") from error
    if not isinstance(row, dict):
        raise Rejected(
            f"not an object but of type {type(row).__name__}; write one JSON object a line"
        )
    return row


def _build_row(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, value in pairs:
        if name in row:
            raise Rejected(f"field {name!r} stands twice")
        row[name] = value
    return row


def _reject_constant(name: str) -> float:
    raise Rejected(f"{name} is not a number that JSON knows")


def _measure_depth(text: str) -> int:
    """Return the depth of nested brackets, before the parser would recurse that deep."""
    depth = deepest = 0
    for bracket in _BRACKETS.findall(_STRINGS.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


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


def _parse_messages(row: Mapping[str, Any]) -> tuple[Message, ...]:
    if ("prompt" in row) == ("messages" in row):
        raise Rejected("give either prompt or messages" + (", not both" if "prompt" in row else ""))
    if "prompt" in row:
        prompt = _get_text(row, "prompt")
        if not prompt or not prompt.strip():
            raise Rejected("prompt is empty")
        return (Message("user", prompt),)
    turns = row["messages"]
    if not isinstance(turns, list) or not turns:
        raise Rejected("messages is not a list of turns")
    messages = tuple(_parse_message(turn, f"messages[{n}]") for n, turn in enumerate(turns))
    _check_order(messages)
    return messages


def _parse_message(turn: Any, name: str) -> Message:
    if not isinstance(turn, dict) or set(turn) != {"role", "content"}:
        raise Rejected(f"{name} is not an object with role and content")
    if turn["role"] not in ROLES:
        raise Rejected(f"{name}.role is {turn['role']!r}; known: {', '.join(ROLES)}")
    if not isinstance(turn["content"], str):
        raise Rejected(f"{name}.content is not a text")
    return Message(turn["role"], _check_text(turn["content"], f"{name}.content"))


def _check_order(messages: tuple[Message, ...]) -> None:
    turns = [message.role for message in messages if message.role != "system"]
    if any(message.role == "system" for message in messages[1:]):
        raise Rejected("a system turn stands after another turn; put it first")
    if not turns or turns != [("user", "assistant")[n % 2] for n in range(len(turns))]:
        raise Rejected("user and assistant turns do not alternate, beginning with user")
    if turns[-1] != "user":
        raise Rejected(
            "the last turn is not the user's, so there is nothing to answer; leave the reply out"
        )
    if not messages[-1].content.strip():
        raise Rejected("the last turn is empty")


def _parse_answer(row: Mapping[str, Any]) -> str | None:
    answer = row.get("answer")
    if answer is None:
        return None
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise Rejected(f"answer is of type {type(answer).__name__}, not a text or a number")
    if isinstance(answer, float) and not math.isfinite(answer):
        raise Rejected("answer is too large for a number; write it as a text")
    text = _check_text(str(answer), "answer")
    if not text.strip():
        raise Rejected("answer is empty; leave it out where there is none")
    return text


def _parse_privileged(row: Mapping[str, Any]) -> dict[str, str]:
    fields = row.get("privileged", {})
    if not isinstance(fields, dict) or not all(isinstance(value, str) for value in fields.values()):
        raise Rejected("privileged is not an object of texts")
    return {
        _check_text(name, "privileged"): _check_text(value, f"privileged.{name}")
        for name, value in fields.items()
    }
