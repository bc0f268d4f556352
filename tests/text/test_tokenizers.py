"""A tokenizer that panics, or that could compute without bound, is refused in one line when it is loaded."""

import base64
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from text.test_renderer import byte_tokenizer

from practicum.errors import ModelError
from practicum.models.config import ModelConfig
from practicum.text.tokenizers import load_renderer


def write(folder: Path, **parts: Any) -> ModelConfig:
    """Write a model's tokenizer to disk, with changed parts."""
    byte_tokenizer().save_pretrained(folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    return ModelConfig(model=str(folder))


def chars_map(content: bytes) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


def replacing(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def in_sequence(*normalizers: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(normalizers)}


@pytest.mark.parametrize(
    "normalizer",
    [
        chars_map(b"\x01\x02"),
        chars_map(b""),
        # These can be loaded, and fail at the first text, or at one of the characters.
        chars_map(bytes([8, 4, 0, 0]) + random.Random(1).randbytes(1032)),
        in_sequence(chars_map(bytes([8, 4, 0, 0]) + random.Random(2).randbytes(1032))),
    ],
)
def test_a_panic_is_an_error_in_one_line(normalizer: dict[str, Any], tmp_path: Path) -> None:
    config = write(tmp_path, normalizer=normalizer)
    with pytest.raises(ModelError) as refusal:
        load_renderer(config)
    text = str(refusal.value)
    assert text.startswith(f"{tmp_path}: no tokenizer could be loaded (") and "\n" not in text


NESTED = {"Regex": "(a+)+b"}
"""A pattern that tries all ways to split a row of the letter a."""


@pytest.mark.parametrize(
    "part",
    [
        {"normalizer": {"type": "Replace", "pattern": NESTED, "content": "b"}},
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": NESTED,
                "behavior": "Isolated",
                "invert": False,
            }
        },
    ],
    ids=["normalizer", "pre_tokenizer"],
)
def test_a_pattern_that_goes_back_too_often_is_refused(
    part: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer could be loaded .*retry-limit") as refusal:
        load_renderer(write(tmp_path, **part))
    assert "\n" not in str(refusal.value)


def test_a_panic_at_a_text_is_an_error_that_shows_it(tmp_path: Path) -> None:
    rare = {"Regex": "((xy)+)+b"}
    split = {"type": "Split", "pattern": rare, "behavior": "Isolated", "invert": False}
    renderer = load_renderer(write(tmp_path, pre_tokenizer=split))
    assert renderer.encode("xyb")
    with pytest.raises(ModelError, match=r"tokenizer.json fail on the text 'xyxy.*retry-limit"):
        renderer.encode("xy" * 50)


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
@pytest.mark.parametrize("rules", [[("a", 2000)] * 2, [("a", 2)] * 40, [("ab", 40_000)]])
def test_rules_that_multiply_a_text_are_refused(
    rules: list[tuple[str, int]], part: str, tmp_path: Path
) -> None:
    made = [replacing(old, "ab" * (count // 2)) for old, count in rules]
    sequence = {"type": "Sequence", f"{part}s": made}
    config = write(tmp_path, **{part: sequence})
    start = time.monotonic()
    with pytest.raises(
        ModelError, match=rf"^{tmp_path}: .*can make a text .* times as long"
    ) as refusal:
        load_renderer(config)
    assert time.monotonic() - start < 5 and "\n" not in str(refusal.value)


def test_a_long_beginning_before_each_text_counts_too(tmp_path: Path) -> None:
    begins = {"type": "Prepend", "prepend": "a" * 2000}
    with pytest.raises(ModelError, match="times as long"):
        load_renderer(write(tmp_path, normalizer=in_sequence(begins, replacing("a", "b" * 2000))))


@pytest.mark.parametrize(
    "normalizer",
    [
        None,
        {"type": "NFC"},
        replacing(" ", "▁"),
        in_sequence({"type": "Prepend", "prepend": "▁"}, replacing(" ", "▁")),
        in_sequence(replacing("``", '"'), replacing("…", "..."), replacing("—", "--")),
        in_sequence(
            {"type": "NFKD"},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"},
        ),
    ],
)
def test_what_published_tokenizers_have_is_read(normalizer: Any, tmp_path: Path) -> None:
    renderer = load_renderer(write(tmp_path, normalizer=normalizer))
    assert renderer.encode("a  b")
