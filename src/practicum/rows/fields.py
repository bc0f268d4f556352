"""From the fields of a row to a prompt: each row is accepted, or rejected with a reason."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from string import ascii_uppercase
from typing import Any

from practicum.rows.chat_turns import Note, check_order, parse_turns
from practicum.rows.pictures import (
    TEACHER_IMAGES,
    drop_pictures,
    name_all,
    name_videos,
    place_pictures,
    place_videos,
)
from practicum.rows.strict import Rejected, check_text
from practicum.types import Message, Prompt

FIELDS = (
    "id",
    "system",
    "prompt",
    "messages",
    "images",
    "audios",
    "videos",
    "teacher_images",
    "choices",
    "answer",
    "reasoning_content",
    "response",
    "domain",
    "teacher",
    "privileged",
)
WHOLE = 2**53
"""Up to this number each whole float is one integer, so it is written as one."""

_TURNS_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*['"](?:role|content|from|value)['"]\s*:""")
_LETTER = re.compile(r"\(?([A-Z])[).:]\s*")
"""A letter that already stands before a choice."""


def ignore(name: str) -> None:
    """Note nothing."""


def read_prompt(row: Mapping[str, Any], name: str, note: Note = ignore) -> Prompt:
    """Return the prompt of a row of `FIELDS`, named `name` if it has no id.

    A field that is None is as if it were not there. `note` gets the name of each key that is not
    used. Raises Rejected with the reason if the row cannot be used.
    """
    row = {field: value for field, value in row.items() if value is not None}
    identity = _get_label(row, "id")
    if identity is not None and not identity.strip():
        raise Rejected("id is empty; leave it out or give it a text")
    messages = _parse_messages(row, note)
    reply = messages[-1] if messages[-1].role == "assistant" else None
    worked = _parse_response(row, note)
    if worked is not None and reply is not None:
        raise Rejected("the last turn is the assistant's, and response is given; leave one out")
    question = messages if reply is None else messages[:-1]
    answer = row.get("answer")
    if "choices" in row:
        question, answer = _add_choices(question, row["choices"], answer)
    privileged = _parse_privileged(row)
    if teacher_images := name_all(row.get("teacher_images"), "teacher_images"):
        place_pictures(drop_pictures(question), teacher_images)
        privileged[TEACHER_IMAGES] = json.dumps(teacher_images)
    images, sounds = (name_all(row.get(column), column) for column in ("images", "audios"))
    videos = name_videos(row["videos"]) if "videos" in row else []
    question, images = place_videos(question, images, videos)
    question = place_pictures(question, [*images, *sounds])
    response = _check_imitated(reply or worked)
    prompt = Prompt(
        id=identity or name,
        messages=question,
        answer=_parse_answer(answer),
        response=None if response is None else response.content,
        domain=_get_label(row, "domain"),
        teacher=_get_text(row, "teacher"),
        privileged=privileged,
        reasoning=None if response is None else response.reasoning,
    )
    return _add_reasoning(prompt, _get_text(row, "reasoning_content"), note)


def _get_text(row: Mapping[str, Any], name: str) -> str | None:
    value = row.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise Rejected(f"{name} is of type {type(value).__name__}, not a text")
    return check_text(value, name)


def _get_label(row: Mapping[str, Any], name: str) -> str | None:
    """Return a text or an integer as a text; tables number their rows and classes."""
    value = row.get(name)
    return str(value) if type(value) is int else _get_text(row, name)


def _parse_messages(row: Mapping[str, Any], note: Note) -> tuple[Message, ...]:
    """Return the turns of a row, which may end with the assistant's answer."""
    if ("prompt" in row) == ("messages" in row):
        raise Rejected("give either prompt or messages" + (", not both" if "prompt" in row else ""))
    field = "prompt" if "prompt" in row else "messages"
    turns = row[field]
    is_question = field == "prompt" and not isinstance(turns, list)
    # Tables of texts, such as CSV, hold turns as JSON text.
    if is_question and not (isinstance(turns, str) and _TURNS_AS_TEXT.match(turns)):
        messages = (Message("user", _parse_question(row)),)
    else:
        messages = parse_turns(turns, field, note)
    system = _get_text(row, "system")
    if system and system.strip():
        if messages[0].role == "system":
            raise Rejected("system is given, and the turns begin with a system turn; leave one out")
        messages = (Message("system", system), *messages)
    check_order(messages)
    return messages


def _parse_question(row: Mapping[str, Any]) -> str:
    prompt = _get_text(row, "prompt")
    if not prompt or not prompt.strip():
        raise Rejected("prompt is empty")
    return prompt


def _parse_response(row: Mapping[str, Any], note: Note) -> Message | None:
    """Return the worked answer: a text, or a list of one turn of the assistant."""
    if not isinstance(row.get("response"), list):
        text = _get_text(row, "response")
        return None if text is None else Message("assistant", text)
    turns = parse_turns(row["response"], "response", note)
    if [turn.role for turn in turns] != ["assistant"]:
        raise Rejected("response is not one turn of the assistant")
    return turns[0]


def _check_imitated(answer: Message | None) -> Message | None:
    """Return an answer to imitate; Rejected if it calls tools."""
    if answer is not None and answer.tool_calls:
        raise Rejected(
            f"the answer calls the tool {answer.tool_calls[0].name[:40]!r}, and answers with calls "
            "are not trained on; leave the row out, or end it before the call or after the result"
        )
    return answer


def _add_reasoning(prompt: Prompt, reasoning: str | None, note: Note) -> Prompt:
    """Return the prompt with the thoughts of the row before its response."""
    if reasoning is None:
        return prompt
    if prompt.response is None:
        note("reasoning_content")
        return prompt
    if prompt.reasoning is not None:
        raise Rejected("reasoning_content is given, and the answer has its own; leave one out")
    return replace(prompt, reasoning=reasoning)


def _add_choices(
    messages: tuple[Message, ...], choices: Any, answer: Any
) -> tuple[tuple[Message, ...], Any]:
    """Return the question with its lettered choices below it, and the letter of the right one."""
    letters, texts = _list_choices(choices)
    *earlier, last = messages
    if last.role != "user":
        raise Rejected("choices belong to a question of the user, which is not the last turn")
    lines = "\n".join(f"{letter}. {text}" for letter, text in zip(letters, texts, strict=True))
    question = (*earlier, replace(last, content=f"{last.content}\n\n{lines}"))
    return question, _choose_letter(_unwrap_answer(answer), letters, texts)


def _list_choices(choices: Any) -> tuple[list[str], list[str]]:
    """Return the letters and texts of a list of choices, or of an object that has both."""
    letters: Any = None
    if isinstance(choices, dict) and choices.keys() == {"text", "label"}:
        letters, choices = choices["label"], choices["text"]
    elif isinstance(choices, dict):
        letters, choices = list(choices.keys()), list(choices.values())
    if not isinstance(choices, list) or not 2 <= len(choices) <= len(ascii_uppercase):
        raise Rejected("choices is not a list of 2 to 26 texts")
    if not all(isinstance(choice, str | int | float) for choice in choices):
        raise Rejected("choices is not a list of texts")
    texts = [check_text(str(choice), "choices") for choice in choices]
    marks = [_LETTER.match(text) for text in texts]
    if all(marks) and [match[1] for match in marks if match] == [*ascii_uppercase[: len(texts)]]:
        texts = [text[match.end() :] for text, match in zip(texts, marks, strict=True) if match]
    letters = list(ascii_uppercase[: len(texts)]) if letters is None else letters
    if len(letters) != len(texts) or not all(isinstance(letter, str) for letter in letters):
        raise Rejected("choices has not one letter for each text")
    return letters, texts


def _choose_letter(answer: Any, letters: list[str], texts: list[str]) -> Any:
    """Return the letter of the answer, which is an index from 0, a letter or a choice's text."""
    if answer is None or answer in letters:
        return answer
    if isinstance(answer, str) and texts.count(answer) == 1:
        return letters[texts.index(answer)]
    text = _write_number(answer) if isinstance(answer, int | float | str) else ""
    if not isinstance(answer, bool) and text.isascii() and text.isdigit():
        place = int(text) if len(text) < 3 else len(letters)
        if place < len(letters):
            return letters[place]
    raise Rejected(
        f"answer {str(answer)[:40]!r} is no index from 0, no letter and no text of the choices"
    )


def _unwrap_answer(answer: Any) -> Any:
    """Return the only answer of a list, also within `{"target": [...]}` as search tasks write it."""
    if isinstance(answer, dict) and answer.keys() == {"target"}:
        answer = answer["target"]
    if isinstance(answer, list):
        if len(answer) != 1:
            raise Rejected(f"answer is a list of {len(answer)}; write one text or number")
        return answer[0]
    return answer


def _parse_answer(answer: Any) -> str | None:
    answer = _unwrap_answer(answer)
    if answer is None:
        return None
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | Decimal):
        raise Rejected(f"answer is of type {type(answer).__name__}, not a text or a number")
    if isinstance(answer, float | Decimal) and not math.isfinite(answer):
        raise Rejected(f"answer is {answer}, which is not a number; write it as a text")
    text = check_text(_write_number(answer), "answer")
    if not text.strip():
        raise Rejected("answer is empty; leave the field out if a row has no answer")
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
        check_text(name, "privileged"): check_text(value, f"privileged.{name}")
        for name, value in fields.items()
    }
