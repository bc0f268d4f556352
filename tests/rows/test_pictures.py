"""Pictures of rows: each layout gives the same prompt, and what cannot be read is one line before the run."""

import base64
import io
import json
import struct
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from picture_files import draw_picture, encode_picture, write_file, write_url
from row_folder import Folder, read_one

from practicum.errors import DataError
from practicum.pictures import identify, load_bytes
from practicum.prompts import Prompt
from practicum.runs.identity import digest_prompts
from practicum.teachers.privileged import Config, add_context
from practicum.teaching.chat import list_turns

TEXT = "How many dots?"
FILE = encode_picture(draw_picture(0))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    write_file(tmp_path, "a.png")
    return Folder(tmp_path)


def part(**keys: Any) -> dict[str, Any]:
    return {"type": "image", **keys}


def ask(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": TEXT}]}]


URL = write_url(draw_picture(0))
LAYOUTS: dict[str, dict[str, Any]] = {
    "a path": {"prompt": f"<image>{TEXT}", "images": ["a.png"]},
    "a path in a column of one": {"prompt": TEXT, "image": "a.png"},
    "base64": {"prompt": TEXT, "images": [base64.b64encode(FILE).decode()]},
    "a data URL": {"prompt": TEXT, "images": [URL]},
    "TRL: parts and a column": {"prompt": ask(part()), "images": ["a.png"]},
    "TRL: a column only": {"messages": [{"role": "user", "content": TEXT}], "images": ["a.png"]},
    "OpenAI": {"messages": ask({"type": "image_url", "image_url": {"url": URL}})},
    "a part with its file": {"messages": ask(part(image="a.png"))},
    "LLaMA-Factory": {
        "conversations": [{"from": "human", "value": f"<image>{TEXT}"}],
        "images": ["a.png"],
    },
    "ms-swift": {
        "messages": [{"role": "user", "content": f"<image>{TEXT}"}],
        "images": [{"bytes": None, "path": "a.png"}],
    },
    "Arrow": {"prompt": TEXT, "images": [{"bytes": None, "path": "a.png"}]},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_gives_the_same_prompt(folder: Folder, layout: str) -> None:
    (message,) = read_one(folder, LAYOUTS[layout], strict=True).messages
    assert message.content == f"<image>{TEXT}"
    assert [load_bytes(image) for image in message.images] == [FILE]


def test_parquet_of_verl_gives_the_same_prompt(folder: Folder) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    row = {
        "prompt": [{"role": "user", "content": f"<image>{TEXT}"}],
        "images": [{"bytes": FILE, "path": None}],
        "reward_model": {"ground_truth": "3"},
    }
    parquet.write_table(arrow.Table.from_pylist([row]), folder.path / "rows.parquet")
    (prompt,) = folder.task(path="rows.parquet").train_prompts()
    assert prompt.messages[0].content == f"<image>{TEXT}"
    assert load_bytes(prompt.messages[0].images[0]) == FILE
    assert prompt.answer == "3"


def test_pictures_go_to_their_places_in_order(folder: Folder) -> None:
    write_file(folder.path, "b.png", seed=1)
    turns = [
        {"role": "user", "content": "<image> or"},
        {"role": "assistant", "content": "?"},
        {"role": "user", "content": "this <image>"},
    ]
    prompt = read_one(folder, {"messages": turns, "images": ["a.png", "b.png"]})
    names = [Path(image).name for message in prompt.messages for image in message.images]
    assert names == ["a.png", "b.png"]
    assert [len(message.images) for message in prompt.messages] == [1, 0, 1]


def test_the_same_question_about_another_picture_is_another_prompt(folder: Folder) -> None:
    write_file(folder.path, "b.png", seed=1)
    rows = [b'{"prompt": "How many?", "images": ["%s.png"]}' % name for name in (b"a", b"b")]
    folder.write(rows[0])
    folder.write(rows[1], name="heldout.jsonl")
    assert len(folder.task(heldout="heldout.jsonl").train_prompts()) == 1


def write_bomb() -> bytes:
    """Return a PNG that says it has 12000 x 12000 pixels."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", 12000, 12000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + struct.pack(">I", 13)
        + chunk
        + struct.pack(">I", zlib.crc32(chunk))
        + FILE[33:]
    )


def write_animation() -> bytes:
    buffer = io.BytesIO()
    draw_picture(0).save(buffer, "GIF", save_all=True, append_images=[draw_picture(1)])
    return buffer.getvalue()


BAD: list[tuple[bytes, str]] = [
    (FILE[: len(FILE) // 2], "the picture is damaged"),
    (b"hello", "the file is no picture that is read"),
    (b"", "is empty or has over 64 MiB"),
    (write_bomb(), "over 32 megapixels"),
    (write_bomb().replace(struct.pack(">II", 12000, 12000), struct.pack(">II", 60000, 60000)), ""),
    (write_animation(), "the picture is animated"),
]


@pytest.mark.parametrize(("content", "reason"), BAD)
def test_a_bad_file_is_refused(folder: Folder, content: bytes, reason: str) -> None:
    (folder.path / "bad.png").write_bytes(content)
    with pytest.raises(DataError, match=f"all of its 1 rows are unusable; row 1 .*{reason}"):
        read_one(folder, {"prompt": TEXT, "images": ["bad.png"]})


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": TEXT, "images": ["http://host/a.png"]}, "http: is not read, only files and data:"),
    ({"prompt": TEXT, "images": ["s3://bucket/a.png"]}, "s3: is not read"),
    ({"prompt": TEXT, "images": ["missing.png"]}, "cannot be read .*paths start at the folder"),
    ({"prompt": TEXT, "images": [3]}, r"images\[0\] is no picture"),
    ({"prompt": "<image><image>", "images": ["a.png"]}, "has 1 pictures and 2 places"),
    ({"messages": ask(part())}, "has 0 pictures and 1 places"),
    ({"prompt": TEXT, "images": ["data:image/png;base64,!"]}, "is not base64"),
    (
        {"messages": [*ask(), {"role": "assistant", "content": [part(image="a.png")]}]},
        r"messages\[1\] is not a turn of the user, and holds a picture",
    ),
]


@pytest.mark.parametrize(("row", "reason"), REFUSED)
def test_a_bad_row_is_refused(folder: Folder, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=f"row 1 .*{reason}"):
        read_one(folder, row)


def test_the_id_of_a_picture_is_one_that_json_holds_exactly() -> None:
    ids = {identify(encode_picture(draw_picture(seed))) for seed in range(20)}
    assert len(ids) == 20
    assert all(float(number) == number and 2**52 <= number < 2**53 for number in ids)


def test_the_identity_of_prompts_has_the_content_of_their_pictures(folder: Folder) -> None:
    def digest() -> str:
        return digest_prompts([read_one(folder, {"prompt": TEXT, "images": ["a.png"]})])

    before = digest()
    assert digest() == before
    write_file(folder.path, "a.png", seed=1)
    assert digest() != before


def test_a_chat_server_is_sent_no_prompt_with_pictures(folder: Folder) -> None:
    prompt = read_one(folder, {"prompt": TEXT, "images": ["a.png"]})
    with pytest.raises(DataError, match="only texts are sent to a chat server"):
        list_turns(prompt.messages)


def test_a_prompt_with_pictures_survives_json(folder: Folder) -> None:
    prompt = read_one(folder, {"prompt": TEXT, "images": ["a.png"]})
    assert Prompt.from_json(json.loads(json.dumps(asdict(prompt)))) == prompt


def test_a_teacher_sees_its_own_pictures_or_none(folder: Folder) -> None:
    write_file(folder.path, "b.png", seed=1)
    row = {"prompt": f"<image>{TEXT}", "images": ["a.png"], "teacher_images": ["b.png"]}
    prompt = read_one(folder, row)

    def see(**settings: Any) -> tuple[str, list[str]]:
        config = Config.model_validate({"teacher": {"type": "self"}, **settings})
        (turn,) = add_context(prompt, config).messages
        return turn.content, [Path(image).name for image in turn.images]

    assert see(images="none") == (TEXT, [])
    assert see(images="teacher") == (f"<image>{TEXT}", ["b.png"])
    assert see(question="A caption. {question}") == (f"A caption. <image>{TEXT}", ["a.png"])
    assert see(question="Another?") == ("<image>Another?", ["a.png"])
    assert see(question="A caption. {question}", images="none") == (f"A caption. {TEXT}", [])
    with pytest.raises(DataError, match=r"teacher\.question shows other places for them"):
        see(question="{question} {question}")


@pytest.mark.parametrize("key", ["reference", "question"])
def test_a_mark_in_a_shown_text_is_no_place_of_a_picture(folder: Folder, key: str) -> None:
    prompt = read_one(folder, {"prompt": TEXT, "images": ["a.png"]})
    settings = {"teacher": {"type": "self"}, key: "A note: {note} {question}"}
    config = Config.model_validate(settings)
    fields = {"note": "<image>, or <image>?"}
    (turn,) = add_context(prompt, config, fields).messages
    assert turn.content.count("<image>") == len(turn.images) == 1
    assert "A note: < image>, or < image>?" in turn.content


def test_a_teachers_pictures_are_counted_and_asked_for(folder: Folder) -> None:
    row = {"prompt": "<image><image>", "images": ["a.png"] * 2, "teacher_images": ["a.png"]}
    with pytest.raises(DataError, match="the row has 1 pictures and 2 places"):
        read_one(folder, row)
    prompt = read_one(folder, {"prompt": TEXT, "images": ["a.png"]})
    config = Config.model_validate({"teacher": {"type": "self"}, "images": "teacher"})
    with pytest.raises(DataError, match=r"has no teacher_images, which teacher\.images asks for"):
        add_context(prompt, config)
