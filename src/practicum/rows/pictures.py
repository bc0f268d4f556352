"""Read the pictures and sounds of a row: in a column, in the parts of a turn, by path, bytes, base64 or `data:` URL.

A video is a list of its frames, and each of them is read as a picture.
"""

import binascii
import json
import re
from base64 import b64decode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from practicum.errors import DataError
from practicum.pictures import (
    AUDIO,
    IMAGE,
    SOUND,
    encode_bytes,
    get_mark,
    is_sound,
    list_places,
    load_picture,
    split_text,
)
from practicum.prompts import Message, Prompt
from practicum.rows.strict import Rejected
from practicum.sounds import write_sound

TEACHER_IMAGES = "teacher_images"
"""The column, and the privileged field, with the pictures that a teacher sees instead (ms-swift)."""

PICTURE_PARTS = ("image", "image_url", "input_image")
"""The types of a turn's parts that are pictures (TRL and OpenAI)."""

SOUND_PARTS = ("audio", "audio_url", "input_audio")
"""The types of a turn's parts that are sounds (ms-swift and OpenAI)."""

VIDEO_PARTS = ("video", "video_url", "input_video")
"""The types of a turn's parts that are videos (ms-swift, and qwen-vl-utils with a list of frames)."""

VIDEO = "<video>"
"""The place of a video's frames in a text, as LLaMA-Factory and ms-swift write it."""

_KEYS = (*PICTURE_PARTS, *SOUND_PARTS, "url", "path", "data")
_STARTS = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM", b"II*\0", b"MM\0*")
_STARTS += (b"fLaC", b"OggS", b"ID3")
"""The first bytes of files of pictures and sounds, which tell base64 from a path."""


def name_all(cell: Any, place: str) -> list[str]:
    """Return a column's media as paths or `data:` URLs; a single one may stand without a list."""
    cells = [] if cell is None else cell if isinstance(cell, list) else [cell]
    name = name_sound if place == "audios" else name_picture
    return [name(inner, f"{place}[{number}]") for number, inner in enumerate(cells)]


def name_part(part: Mapping[str, Any], place: str) -> str:
    """Return the medium of a turn's part; without a name if the row's column holds it (TRL)."""
    inner = next((part[key] for key in _KEYS if part.get(key) is not None), None)
    if part["type"] in SOUND_PARTS:
        return SOUND if inner is None else name_sound(inner, place)
    return "" if inner is None else name_picture(inner, place)


def name_videos(cell: Any) -> list[list[str]]:
    """Return the frames of each video in the column `videos`."""
    cells = cell if isinstance(cell, list) else [cell]
    return [name_frames(video, f"videos[{number}]") for number, video in enumerate(cells)]


def name_frames(cell: Any, place: str) -> list[str]:
    """Return a video's frames as paths or `data:` URLs; Rejected if the cell is no list of them."""
    while isinstance(cell, Mapping):
        cell = next((cell[key] for key in ("frames", *VIDEO_PARTS) if cell.get(key)), None)
    if not isinstance(cell, list) or not cell:
        raise Rejected(
            f"{place} is no list of frames, and a video's file is not read; extract its frames, for "
            "example with ffmpeg -i IN -vf fps=1 %03d.png, and write one list of paths for each video"
        )
    return [name_picture(frame, f"{place}[{number}]") for number, frame in enumerate(cell)]


def name_sound(cell: Any, place: str) -> str:
    """Return a sound as `audio:` and a path, or as a `data:` URL; Rejected if the cell is none."""
    if isinstance(cell, Mapping) and cell.get("array") is not None:
        # Samples as the feature Audio of `datasets` holds them.
        try:
            cell = write_sound(cell["array"], cell["sampling_rate"])
        except (TypeError, ValueError, KeyError) as error:
            raise Rejected(
                f"{place} is no sound ({error!r}); write array with samples from -1 to 1, and sampling_rate"
            ) from None
    name = _name_file(cell, place, "sound", "data:audio/wav;base64,...")
    if name.startswith("data:image/any"):
        return name.replace("image", "audio", 1)
    return name if is_sound(name) else SOUND + name


def name_picture(cell: Any, place: str) -> str:
    """Return a picture as a path or a `data:` URL; Rejected if the cell is none."""
    name = _name_file(cell, place, "picture", "data:image/png;base64,...")
    if is_sound(name):
        raise Rejected(f"{place} is a sound; write it in audios")
    return name


def _name_file(cell: Any, place: str, kind: str, example: str) -> str:
    if isinstance(cell, Mapping):
        # A struct of Arrow (datasets, verl) has both keys, and one is empty.
        content = cell.get("bytes")
        inner = (cell[key] for key in _KEYS if cell.get(key))
        cell = content if isinstance(content, bytes) else next(inner, None)
    if isinstance(cell, bytes):
        return encode_bytes(cell)
    if not isinstance(cell, str) or not cell.strip():
        raise Rejected(f"{place} is no {kind}; write a path, its bytes, or {example}")
    if len(cell) < 64 or ":" in cell[:64]:
        return cell
    try:
        start = b64decode(cell[:64], validate=True)
    except binascii.Error:
        return cell
    return f"data:image/any;base64,{cell}" if start.startswith(_STARTS) else cell


_UNNAMED = {IMAGE: "", AUDIO: SOUND}
"""The name of a part whose medium is in a column."""


def place_pictures(messages: tuple[Message, ...], images: Sequence[str]) -> tuple[Message, ...]:
    """Give a row's media to its turns, in the order of `<image>` or `<audio>`; without one, to the first turn.

    Rejected if there is not one place for each picture and sound.
    """
    users = [number for number, turn in enumerate(messages) if turn.role == "user"]
    media = [*images, *(image for number in users for image in messages[number].images)]
    if not media:
        return messages
    turns = list(messages)
    waiting = {mark: [i for i in images if get_mark(i) == mark] for mark in (IMAGE, AUDIO)}
    for mark, kind in ((IMAGE, "picture"), (AUDIO, "sound")):
        names = [image for image in media if get_mark(image) == mark]
        if not names:
            continue
        if waiting[mark] and not any(mark in turns[number].content for number in users):
            first = turns[users[0]]
            text = mark * len(waiting[mark]) + first.content
            turns[users[0]] = replace(first, content=text)
        places = sum(turns[number].content.count(mark) for number in users)
        files = sum(name not in _UNNAMED.values() for name in names)
        if places != files:
            raise Rejected(
                f"the row has {files} {kind}s and {places} places for them; write {mark} once in a user's "
                f"turn for each {kind} in {'images' if mark == IMAGE else 'audios'}"
            )
    for number in users:
        marks = list_places(turns[number].content, media)
        parts = turns[number].images or [_UNNAMED[mark] for mark in marks]
        if [get_mark(image) for image in parts] != marks:
            raise Rejected(
                f"a turn's text holds {IMAGE} or {AUDIO} next to its parts; take it out of the text"
            )
        filled = [waiting[get_mark(i)].pop(0) if i in _UNNAMED.values() else i for i in parts]
        turns[number] = replace(turns[number], images=tuple(filled))
    return tuple(turns)


def place_videos(
    messages: tuple[Message, ...], pictures: Sequence[str], videos: Sequence[Sequence[str]]
) -> tuple[tuple[Message, ...], list[str]]:
    """Return the turns and pictures with each `<video>` as the `<image>` of its frames.

    Without `<video>`, the frames stand before the first question. Rejected if there is not one
    place for each video.
    """
    if not videos:
        return messages, list(pictures)
    turns, waiting, frames = list(messages), list(pictures), list(videos)
    users = [number for number, turn in enumerate(turns) if turn.role == "user"]
    for mark, files in ((VIDEO, videos), (IMAGE, pictures)):
        if not any(mark in turns[number].content for number in users):
            first = turns[users[0]]
            turns[users[0]] = replace(first, content=mark * len(files) + first.content)
    if (places := sum(turns[number].content.count(VIDEO) for number in users)) != len(videos):
        raise Rejected(
            f"the row has {len(videos)} videos and {places} places for them; write {VIDEO} once in a "
            "user's turn for each video in videos"
        )
    merged = list[str]()
    for number in users:
        texts, parts, filled = list[str](), list(turns[number].images), list[str]()
        for text in re.split(f"({VIDEO}|{IMAGE}|{AUDIO})", turns[number].content):
            if text == VIDEO:
                merged += (stills := frames.pop(0))
                filled += [""] * len(stills)
                text = IMAGE * len(stills)
            elif text in (IMAGE, AUDIO):
                filled.append(parts.pop(0) if parts else "")
                if text == IMAGE and not filled[-1] and waiting:
                    merged.append(waiting.pop(0))
            texts.append(text)
        images = tuple(filled) if turns[number].images else ()
        turns[number] = replace(turns[number], content="".join(texts), images=images)
    return tuple(turns), merged + waiting


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
        replace(turn, content="".join(split_text(turn.content, before.images)))
        for turn, before in pairs
    )
    return replace(prompt, messages=tuple(texts))


def _locate(image: str, folder: Path) -> str:
    path = image.removeprefix(SOUND)
    if ":" not in path[:32]:
        path = str((folder / Path(path).expanduser()).absolute())
        image = SOUND + path if is_sound(image) else path
    if reason := _find_fault(image):
        raise Rejected(f"{'audios' if is_sound(image) else 'images'}: {reason}")
    return image


@lru_cache(maxsize=64)
def _find_fault(image: str) -> str:
    """Return why a picture cannot be read, or an empty text; many rows may show one picture."""
    try:
        load_picture(image)
    except DataError as error:
        return str(error)
    return ""


def have_pictures(prompts: Iterable[Prompt]) -> bool:
    """Return True if a prompt has pictures, for the student or for the teacher."""
    return any(
        TEACHER_IMAGES in prompt.privileged or any(message.images for message in prompt.messages)
        for prompt in prompts
    )
