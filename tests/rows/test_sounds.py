"""Sounds of rows: each layout gives the same prompt, and what cannot be read is one line before the run."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from picture_files import write_file
from row_folder import Folder, read_one
from sound_files import make_sound, write_sound_url

from practicum.errors import DataError
from practicum.pictures import is_sound, load_bytes
from practicum.sounds import RATE, open_sound
from practicum.teachers.privileged import Config, add_context

TEXT = "Which digit?"
FILE = make_sound(0)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    (tmp_path / "a.wav").write_bytes(FILE)
    return Folder(tmp_path)


def ask(kind: str, **keys: Any) -> list[dict[str, Any]]:
    parts = [{"type": kind, **keys}, {"type": "text", "text": TEXT}]
    return [{"role": "user", "content": parts}]


BASE64 = base64.b64encode(FILE).decode()
LAYOUTS: dict[str, dict[str, Any]] = {
    "a path": {"prompt": f"<audio>{TEXT}", "audios": ["a.wav"]},
    "a path in a column of one": {"prompt": TEXT, "audio": "a.wav"},
    "base64": {"prompt": TEXT, "audios": [BASE64]},
    "a data URL": {"prompt": TEXT, "audios": [write_sound_url(0)]},
    "samples (datasets)": {
        "prompt": TEXT,
        "audio": {"array": open_sound(FILE).tolist(), "sampling_rate": RATE},
    },
    "Arrow": {"prompt": TEXT, "audio": {"bytes": None, "path": "a.wav"}},
    "ms-swift": {"messages": [{"role": "user", "content": f"<audio>{TEXT}"}], "audios": ["a.wav"]},
    "a part with its file": {"messages": ask("audio", audio="a.wav")},
    "a part and a column": {"messages": ask("audio"), "audios": ["a.wav"]},
    "LLaMA-Factory": {
        "conversations": [{"from": "human", "value": f"<audio>{TEXT}"}],
        "audios": ["a.wav"],
    },
    "OpenAI": {"messages": ask("input_audio", input_audio={"data": BASE64, "format": "wav"})},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_gives_the_same_prompt(folder: Folder, layout: str) -> None:
    (message,) = read_one(folder, LAYOUTS[layout], strict=True).messages
    assert message.content == f"<audio>{TEXT}"
    (sound,) = message.images
    assert is_sound(sound)
    samples = open_sound(load_bytes(sound))
    np.testing.assert_allclose(samples, open_sound(FILE), atol=1e-4)


def test_parquet_gives_the_same_prompt(folder: Folder) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    row = {"prompt": TEXT, "audio": {"bytes": FILE, "path": None}}
    parquet.write_table(arrow.Table.from_pylist([row]), folder.path / "rows.parquet")
    (prompt,) = folder.task(path="rows.parquet").train_prompts()
    assert prompt.messages[0].content == f"<audio>{TEXT}"
    assert load_bytes(prompt.messages[0].images[0]) == FILE


def test_pictures_and_sounds_go_to_their_own_places(folder: Folder) -> None:
    write_file(folder.path, "a.png")
    (folder.path / "b.wav").write_bytes(make_sound(1))
    row = {
        "prompt": "<audio> or <image> or <audio>",
        "images": ["a.png"],
        "audios": ["a.wav", "b.wav"],
    }
    (message,) = read_one(folder, row).messages
    assert [Path(name).name for name in message.images] == ["a.wav", "a.png", "b.wav"]


def test_a_mark_without_sounds_is_text(folder: Folder) -> None:
    write_file(folder.path, "a.png")
    (message,) = read_one(folder, {"prompt": "the tag <audio>", "images": ["a.png"]}).messages
    assert message.content == "<image>the tag <audio>"
    assert [Path(name).name for name in message.images] == ["a.png"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": TEXT, "audios": ["https://host/a.wav"]}, "audios: sound .*https: is not read"),
    ({"prompt": TEXT, "audios": ["b.wav"]}, "audios: sound .* cannot be read"),
    ({"prompt": TEXT, "audios": ["empty.wav"]}, "audios: sound .* is empty or has over 64 MiB"),
    ({"prompt": TEXT, "audios": ["a.mp3"]}, "audios: the file is no WAV; convert it"),
    ({"prompt": TEXT, "audios": ["slow.wav"]}, "audios: the sound has 8000 samples per second"),
    ({"prompt": TEXT, "audios": ["long.wav"]}, "audios: the sound has 31.00 seconds"),
    (
        {"prompt": TEXT, "audios": [3]},
        r"audios\[0\] is no sound; write a path, its bytes, or data:audio",
    ),
    ({"prompt": TEXT, "audio": {"array": [2], "sampling_rate": RATE}}, r"not within -1 to 1"),
    (
        {"prompt": TEXT, "audio": {"array": [0.5]}},
        r"write array with samples .*, and sampling_rate",
    ),
    (
        {"prompt": TEXT, "images": [write_sound_url(0)]},
        r"images\[0\] is a sound; write it in audios",
    ),
    ({"prompt": "<audio><audio>", "audios": ["a.wav"]}, "1 sounds and 2 places .* in audios"),
    ({"messages": ask("audio")}, "0 sounds and 1 places"),
]


@pytest.mark.parametrize(("row", "reason"), REFUSED)
def test_a_bad_row_is_refused(folder: Folder, row: dict[str, Any], reason: str) -> None:
    files = {"empty.wav": b"", "a.mp3": b"ID3", "slow.wav": make_sound(0, rate=8000)}
    for name, content in {**files, "long.wav": make_sound(0, 31)}.items():
        (folder.path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"row 1 .*{reason}"):
        read_one(folder, row)


def test_a_teacher_reads_the_transcript_instead(folder: Folder) -> None:
    row = {
        "prompt": f"<audio>{TEXT}",
        "audios": ["a.wav"],
        "privileged": {"transcript": "a <audio>"},
    }
    prompt = read_one(folder, row)

    def see(**settings: Any) -> tuple[str, int]:
        config = Config.model_validate({"teacher": {"type": "self"}, **settings})
        (turn,) = add_context(prompt, config).messages
        return turn.content, len(turn.images)

    assert see(images="none") == (TEXT, 0)
    assert see(images="none", question="{transcript}") == ("a <audio>", 0)
    assert see(question="{transcript}?") == ("<audio>a < audio>?", 1)
