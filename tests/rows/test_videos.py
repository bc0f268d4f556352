"""Videos of rows are their frames, in each layout; a video's file is refused in one line."""

from pathlib import Path
from typing import Any

import pytest
from picture_files import draw_picture, encode_picture, write_file
from row_folder import Folder, read_one

from practicum.errors import DataError
from practicum.pictures import load_bytes

TEXT = "Which way does the dot move?"
FRAMES = ["0.png", "1.png", "2.png"]
FILES = [encode_picture(draw_picture(number)) for number in range(4)]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    for number in range(4):
        write_file(tmp_path, f"{number}.png", number)
    return Folder(tmp_path)


def ask(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": TEXT}]}]


LAYOUTS: dict[str, dict[str, Any]] = {
    "a column": {"prompt": f"<video>{TEXT}", "videos": [FRAMES]},
    "a column only": {"prompt": TEXT, "videos": [FRAMES]},
    "the column video": {"prompt": TEXT, "video": [FRAMES]},
    "verl": {
        "prompt": [{"role": "user", "content": f"<video>{TEXT}"}],
        "videos": [{"type": "video", "video": FRAMES}],
    },
    "qwen-vl-utils": {"messages": ask({"type": "video", "video": FRAMES})},
    "frames": {"messages": ask({"type": "video", "frames": FRAMES})},
    "LLaMA-Factory": {
        "conversations": [{"from": "human", "value": f"<video>{TEXT}"}],
        "videos": [FRAMES],
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_gives_the_frames_as_pictures(folder: Folder, layout: str) -> None:
    (message,) = read_one(folder, LAYOUTS[layout], strict=True).messages
    assert message.content == f"<image><image><image>{TEXT}"
    assert [load_bytes(image) for image in message.images] == FILES[:3]


MIXED: list[dict[str, Any]] = [
    {"prompt": "<image> then <video>", "images": ["3.png"], "videos": [FRAMES[:2]]},
    {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image"},
                    {"type": "text", "text": " then "},
                    {"type": "video", "video": FRAMES[:2]},
                ],
            }
        ],
        "images": ["3.png"],
    },
    {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image"}, {"type": "text", "text": " then <video>"}],
            }
        ],
        "images": ["3.png"],
        "videos": [FRAMES[:2]],
    },
]


@pytest.mark.parametrize("row", MIXED)
def test_pictures_and_videos_keep_their_order(folder: Folder, row: dict[str, Any]) -> None:
    (message,) = read_one(folder, row).messages
    assert message.content == "<image> then <image><image>"
    assert [load_bytes(image) for image in message.images] == [FILES[3], *FILES[:2]]


def test_two_videos_have_their_places_in_two_turns(folder: Folder) -> None:
    turns = [
        {"role": "user", "content": "<video>First?"},
        {"role": "assistant", "content": "Left."},
        {"role": "user", "content": "<video>And now?"},
    ]
    row = {"messages": turns, "videos": [FRAMES[:1], FRAMES[1:]]}
    first, _, last = read_one(folder, row).messages
    assert [load_bytes(image) for image in first.images] == FILES[:1]
    assert last.content == "<image><image>And now?"
    assert [load_bytes(image) for image in last.images] == FILES[1:3]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": TEXT, "videos": ["a.mp4"]}, r"videos\[0\] is no list of frames, .* ffmpeg"),
    ({"prompt": TEXT, "videos": "a.mp4"}, r"videos\[0\] is no list of frames"),
    ({"prompt": TEXT, "videos": [{"path": "a.mp4"}]}, r"videos\[0\] is no list of frames"),
    ({"prompt": TEXT, "videos": [[]]}, r"videos\[0\] is no list of frames"),
    ({"prompt": TEXT, "videos": [["0.png", 3]]}, r"videos\[0\]\[1\] is no picture"),
    ({"prompt": TEXT, "videos": [["0.png", "missing.png"]]}, "missing.png' cannot be read"),
    ({"prompt": "<video><video>", "videos": [FRAMES]}, "1 videos and 2 places"),
    ({"messages": ask({"type": "video"})}, r"content\[0\] is no list of frames"),
    ({"messages": ask({"type": "video", "video": "a.mp4"})}, r"content\[0\] is no list"),
    (
        {"prompt": "<image><video>", "images": ["0.png", "1.png"], "videos": [FRAMES]},
        "5 pictures and 4 places",
    ),
]


@pytest.mark.parametrize(("row", "reason"), REFUSED)
def test_a_bad_video_is_refused(folder: Folder, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=f"row 1 .*{reason}"):
        read_one(folder, row)
