"""Read the pictures of a row: in a column, in the parts of a turn, by path, bytes, base64 or `data:` URL."""

import binascii
import json
from base64 import b64decode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from practicum.errors import DataError
from practicum.pictures import IMAGE, encode_bytes, load_bytes, open_picture
from practicum.prompts import Message, Prompt
from practicum.rows.strict import Rejected

TEACHER_IMAGES = "teacher_images"
"""The column, and the privileged field, with the pictures that a teacher sees instead (ms-swift)."""

PICTURE_PARTS = ("image", "image_url", "input_image")
"""The types of a turn's parts that are pictures (TRL and OpenAI)."""

_KEYS = ("image", "image_url", "url", "path")
_STARTS = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM", b"II*\0", b"MM\0*")
"""The first bytes of picture files, which tell base64 from a path."""


def name_all(cell: Any, place: str) -> list[str]:
    """Return a column's pictures as paths or `data:` URLs; a single one may stand without a list."""
    cells = [] if cell is None else cell if isinstance(cell, list) else [cell]
    return [name_picture(inner, f"{place}[{number}]") for number, inner in enumerate(cells)]


def name_part(part: Mapping[str, Any], place: str) -> str:
    """Return the picture of a turn's part; empty if the row's column `images` holds it (TRL)."""
    inner = next((part[key] for key in _KEYS if part.get(key) is not None), None)
    return "" if inner is None else name_picture(inner, place)


def name_picture(cell: Any, place: str) -> str:
    """Return a picture as a path or a `data:` URL; Rejected if the cell is none."""
    if isinstance(cell, Mapping):
        # A struct of Arrow (datasets, verl) has both keys, and one is empty.
        content = cell.get("bytes")
        inner = (cell[key] for key in _KEYS if cell.get(key))
        cell = content if isinstance(content, bytes) else next(inner, None)
    if isinstance(cell, bytes):
        return encode_bytes(cell)
    if not isinstance(cell, str) or not cell.strip():
        raise Rejected(
            f"{place} is no picture; write a path, its bytes, or data:image/png;base64,..."
        )
    if len(cell) < 64 or ":" in cell[:64]:
        return cell
    try:
        start = b64decode(cell[:64], validate=True)
    except binascii.Error:
        return cell
    return f"data:image/any;base64,{cell}" if start.startswith(_STARTS) else cell


def place_pictures(messages: tuple[Message, ...], images: Sequence[str]) -> tuple[Message, ...]:
    """Give a row's pictures to its turns, in the order of `<image>`; without one, to the first turn.

    Rejected if there is not one place for each picture.
    """
    users = [number for number, turn in enumerate(messages) if turn.role == "user"]
    if not images and not any(messages[number].images for number in users):
        return messages
    turns, waiting = list(messages), list(images)
    if images and not any(IMAGE in turns[number].content for number in users):
        first = turns[users[0]]
        turns[users[0]] = replace(first, content=IMAGE * len(images) + first.content)
    places = sum(turns[number].content.count(IMAGE) for number in users)
    files = len(images) + sum(bool(image) for turn in turns for image in turn.images)
    if places != files:
        raise Rejected(
            f"the row has {files} pictures and {places} places for them; write {IMAGE} once in a user's "
            "turn for each picture in images"
        )
    for number in users:
        count = turns[number].content.count(IMAGE)
        parts = turns[number].images or ("",) * count
        if len(parts) != count:
            raise Rejected(
                f"a turn's text holds {IMAGE} next to its parts; take it out of the text"
            )
        filled = tuple(image or waiting.pop(0) for image in parts)
        turns[number] = replace(turns[number], images=filled)
    return tuple(turns)


def drop_pictures(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages without their pictures; the places stay in the text."""
    return tuple(replace(turn, images=()) if turn.images else turn for turn in messages)


def locate_pictures(prompt: Prompt, folder: Path) -> Prompt:
    """Return the prompt with paths that start at a folder; Rejected if a picture cannot be read."""
    messages = tuple(
        replace(turn, images=tuple(_locate(image, folder) for image in turn.images))
        if turn.images
        else turn
        for turn in prompt.messages
    )
    privileged = dict(prompt.privileged)
    if TEACHER_IMAGES in privileged:
        images = json.loads(privileged[TEACHER_IMAGES])
        privileged[TEACHER_IMAGES] = json.dumps([_locate(image, folder) for image in images])
    return replace(prompt, messages=messages, privileged=privileged)


def show_pictures(prompt: Prompt, which: str | None) -> Prompt:
    """Return the prompt with the row's pictures for a teacher (`teacher`), or with `none`.

    DataError if the row has no pictures for a teacher.
    """
    if which is None:
        return prompt
    bare = drop_pictures(prompt.messages)
    if which == "teacher":
        if TEACHER_IMAGES not in prompt.privileged:
            raise DataError(
                f"prompt {prompt.id!r} has no {TEACHER_IMAGES}, which teacher.images asks for; add them "
                "to the task's rows"
            )
        placed = place_pictures(bare, json.loads(prompt.privileged[TEACHER_IMAGES]))
        return replace(prompt, messages=placed)
    pairs = zip(bare, prompt.messages, strict=True)
    texts = (
        replace(turn, content=turn.content.replace(IMAGE, "")) if before.images else turn
        for turn, before in pairs
    )
    return replace(prompt, messages=tuple(texts))


def _locate(image: str, folder: Path) -> str:
    if ":" not in image[:32]:
        image = str((folder / Path(image).expanduser()).absolute())
    if reason := _find_fault(image):
        raise Rejected(f"images: {reason}")
    return image


@lru_cache(maxsize=64)
def _find_fault(image: str) -> str:
    """Return why a picture cannot be read, or an empty text; many rows may show one picture."""
    try:
        open_picture(load_bytes(image))
    except DataError as error:
        return str(error)
    return ""


def have_pictures(prompts: Iterable[Prompt]) -> bool:
    """Return True if a prompt has pictures, for the student or for the teacher."""
    return any(
        TEACHER_IMAGES in prompt.privileged or any(message.images for message in prompt.messages)
        for prompt in prompts
    )
