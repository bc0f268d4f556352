"""Reading rows of JSONL strictly: every row is taken or rejected with its number and a reason."""

import json
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from practicum.errors import DataError
from practicum.objective.calls import did_you_mean
from practicum.types import Message, Prompt

LARGEST_ROW = 1 << 20
DEEPEST = 20
EXCERPT = 120
FIELDS = ("id", "prompt", "messages", "answer", "domain", "teacher", "privileged")
ROLES = ("system", "user", "assistant")


class Rejected(Exception):
    """Why a row cannot be used."""


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a regular file with their numbers, blank ones left out; DataError where it is not one."""
    try:
        kind = path.stat().st_mode
        if not stat.S_ISREG(kind):
            what = "a folder" if stat.S_ISDIR(kind) else "not a regular file"
            raise DataError(f"{path} is {what}; give a JSONL file")
        if path.suffix in (".gz", ".zip", ".parquet", ".arrow"):
            raise DataError(f"{path}: {path.suffix} files are not read; unpack it to JSONL first")
        with path.open("rb") as file:
            for number, line in enumerate(_bounded_lines(file), start=1):
                text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if text.strip():
                    yield number, text
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}); check the path, which starts at the recipe's folder"
        ) from error


def _bounded_lines(file: Any) -> Iterator[bytes]:
    """Lines, each cut just past the size limit, so that no row can fill the memory."""
    while line := file.readline(LARGEST_ROW + 1):
        if len(line) > LARGEST_ROW and not line.endswith(b"\n"):
            while (rest := file.readline(LARGEST_ROW)) and not rest.endswith(b"\n"):
                pass
        yield line


def read_prompt(line: bytes, number: int) -> Prompt:
    """One row as a prompt; Rejected with the reason where it is not one."""
    row = _parsed(line)
    for name in row:
        if name not in FIELDS:
            raise Rejected(f"unknown field {name!r}; {did_you_mean(name, FIELDS)}")
    return Prompt(
        id=_text(row, "id") or str(number),
        messages=_messages(row),
        answer=_answer(row),
        domain=_text(row, "domain"),
        teacher=_text(row, "teacher"),
        privileged=_privileged(row),
    )


def _parsed(line: bytes) -> dict[str, Any]:
    if len(line) > LARGEST_ROW:
        raise Rejected("larger than 1 MiB")
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Rejected(f"not UTF-8 (byte {error.start})") from error
    try:
        row = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (json.JSONDecodeError, RecursionError) as error:
        raise Rejected(f"not JSON ({error})") from error
    if not isinstance(row, dict):
        raise Rejected(f"not an object but a {type(row).__name__}")
    if _depth(row) > DEEPEST:
        raise Rejected(f"nested deeper than {DEEPEST}")
    return row


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise Rejected(f"field {name!r} stands twice")
    return dict(pairs)


def _no_constant(name: str) -> float:
    raise Rejected(f"{name} is not a number that JSON knows")


def _depth(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max((_depth(part) for part in inside), default=0)


def _clean(text: str, name: str) -> str:
    if "\x00" in text:
        raise Rejected(f"{name} contains a NUL character")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise Rejected(f"{name} contains half of a surrogate pair")
    return text


def _text(row: Mapping[str, Any], name: str) -> str | None:
    value = row.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise Rejected(f"{name} is a {type(value).__name__}, not a text")
    return _clean(value, name)


def _messages(row: Mapping[str, Any]) -> tuple[Message, ...]:
    if ("prompt" in row) == ("messages" in row):
        raise Rejected("give either prompt or messages" + (", not both" if "prompt" in row else ""))
    if "prompt" in row:
        prompt = _text(row, "prompt")
        if not prompt or not prompt.strip():
            raise Rejected("prompt is empty")
        return (Message("user", prompt),)
    turns = row["messages"]
    if not isinstance(turns, list) or not turns:
        raise Rejected("messages is not a list of turns")
    messages = tuple(_message(turn, place) for place, turn in enumerate(turns))
    _check_order(messages)
    return messages


def _message(turn: Any, place: int) -> Message:
    if not isinstance(turn, dict) or set(turn) != {"role", "content"}:
        raise Rejected(f"messages[{place}] is not an object with role and content")
    if turn["role"] not in ROLES:
        raise Rejected(f"messages[{place}].role is {turn['role']!r}; known: {', '.join(ROLES)}")
    if not isinstance(turn["content"], str):
        raise Rejected(f"messages[{place}].content is not a text")
    return Message(turn["role"], _clean(turn["content"], f"messages[{place}].content"))


def _check_order(messages: tuple[Message, ...]) -> None:
    turns = [message.role for message in messages if message.role != "system"]
    if any(message.role == "system" for message in messages[1:]):
        raise Rejected("a system turn stands after another turn; put it first")
    if not turns or turns != [("user", "assistant")[place % 2] for place in range(len(turns))]:
        raise Rejected("user and assistant turns do not alternate, beginning with user")
    if turns[-1] != "user":
        raise Rejected("the last turn is not the user's, so there is nothing to answer")


def _answer(row: Mapping[str, Any]) -> str | None:
    value = row.get("answer")
    if isinstance(value, bool) or not isinstance(value, str | int | float | None):
        raise Rejected(f"answer is a {type(value).__name__}, not a text or a number")
    return None if value is None else _clean(str(value), "answer")


def _privileged(row: Mapping[str, Any]) -> dict[str, str]:
    fields = row.get("privileged", {})
    if not isinstance(fields, dict) or not all(isinstance(value, str) for value in fields.values()):
        raise Rejected("privileged is not an object of texts")
    return {name: _clean(value, f"privileged.{name}") for name, value in fields.items()}
