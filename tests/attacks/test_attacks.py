"""Malicious checkpoints: each is refused, and the canary file of its payload never appears.

Every manifest here is valid, since an attacker who writes the files can write the checksums too. Checkpoints are refused
because the formats cannot carry code, the parser of tensors is strict, and links are not followed.
"""

import hashlib
import json
import os
import pickle
import resource
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from practicum.errors import CheckpointError
from practicum.run_dir import RunDir, find_checkpoint, save_checkpoint

Attack = Callable[[Path, Path], None]


class Gadget:
    """An object that runs a shell command when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch '{self.canary}'",)


def with_header(path: Path, header: bytes, data: bytes = b"", size: int | None = None) -> None:
    path.write_bytes(struct.pack("<Q", len(header) if size is None else size) + header + data)


def tensor(start: int, end: int, shape: list[int]) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


def pickle_in_place_of_tensors(folder: Path, canary: Path) -> None:
    (folder / "student.safetensors").write_bytes(pickle.dumps(Gadget(canary)))


def torch_archive_in_place_of_tensors(folder: Path, canary: Path) -> None:
    torch.save({"w": Gadget(canary)}, folder / "student.safetensors")


def header_of_a_terabyte(folder: Path, canary: Path) -> None:
    with_header(folder / "student.safetensors", b"{}", size=2**40)


def header_longer_than_the_file(folder: Path, canary: Path) -> None:
    with_header(folder / "student.safetensors", b"{}", size=2**20)


def overlapping_offsets(folder: Path, canary: Path) -> None:
    header = json.dumps({"a": tensor(0, 16, [4]), "b": tensor(8, 24, [4])}).encode()
    with_header(folder / "student.safetensors", header, bytes(24))


def offsets_past_the_end(folder: Path, canary: Path) -> None:
    header = json.dumps({"a": tensor(0, 2**33, [2**31])}).encode()
    with_header(folder / "student.safetensors", header, bytes(16))


def shape_that_overflows(folder: Path, canary: Path) -> None:
    header = json.dumps({"a": tensor(0, 16, [2**62, 2**62, 4])}).encode()
    with_header(folder / "student.safetensors", header, bytes(16))


def header_with_a_terminal_escape(folder: Path, canary: Path) -> None:
    header = json.dumps({"\x1b[31m\n": tensor(0, 20, [4])}).encode()
    with_header(folder / "student.safetensors", header, bytes(20))


def header_nested_without_end(folder: Path, canary: Path) -> None:
    with_header(folder / "student.safetensors", b'{"a":' * 100_000)


def state_nested_without_end(folder: Path, canary: Path) -> None:
    (folder / "state.json").write_text("[" * 1_000_000)


def state_that_is_a_list(folder: Path, canary: Path) -> None:
    (folder / "state.json").write_text("[20]")


def state_with_nan(folder: Path, canary: Path) -> None:
    (folder / "state.json").write_text('{"step": 20, "loss": NaN}')


def tensors_behind_a_link(folder: Path, canary: Path) -> None:
    outside = folder.parent.parent.parent / "outside.safetensors"
    shutil.move(folder / "student.safetensors", outside)
    (folder / "student.safetensors").symlink_to(outside)


def link_out_of_the_run(folder: Path, canary: Path) -> None:
    (folder / "extra").symlink_to("/")


def pipe_without_a_writer(folder: Path, canary: Path) -> None:
    (folder / "student.safetensors").unlink()
    os.mkfifo(folder / "student.safetensors")


CORPUS = [
    (pickle_in_place_of_tensors, r"student\.safetensors is not a safetensors file"),
    (
        torch_archive_in_place_of_tensors,
        r"student\.safetensors is not a safetensors file \(.*header too large",
    ),
    (header_of_a_terabyte, r"student\.safetensors is not a safetensors file \(.*header too large"),
    (header_longer_than_the_file, r"student\.safetensors is not a safetensors file \(.*header"),
    (overlapping_offsets, r"student\.safetensors is not a safetensors file \(.*"),
    (offsets_past_the_end, r"student\.safetensors is not a safetensors file \(.*"),
    (shape_that_overflows, r"student\.safetensors is not a safetensors file \(.*"),
    (header_with_a_terminal_escape, r"student\.safetensors is not a safetensors file \(.*"),
    (header_nested_without_end, r"student\.safetensors is not a safetensors file \(.*"),
    (state_nested_without_end, r"state\.json cannot be read: nested deeper than 100"),
    (state_that_is_a_list, r"state\.json is not a JSON object"),
    (state_with_nan, r"state\.json cannot be read: NaN is not a number that JSON knows"),
    (tensors_behind_a_link, r"'student\.safetensors' is a symbolic link"),
    (link_out_of_the_run, r"'extra' is a symbolic link"),
    (pipe_without_a_writer, r"'student\.safetensors' is not a plain file"),
]


def write_manifest(folder: Path, **changes: object) -> None:
    """Write checksums and sizes that match the changed folder."""
    files = {
        path.name: {
            "size": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in folder.iterdir()
        if path.is_file() and path.name != "MANIFEST.json"
    }
    (folder / "MANIFEST.json").write_text(json.dumps({"step": 20, "files": files, **changes}))


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """Write a run with a good checkpoint of step 10 and a checkpoint of step 20 to be attacked."""
    made = RunDir.create(tmp_path / "runs", "toy")
    for step in (10, 20):
        save_checkpoint(made, step, {"student": {"w": torch.ones(4)}}, {})
    return made


@pytest.mark.parametrize(
    ("attack", "reason"), CORPUS, ids=[attack.__name__ for attack, _ in CORPUS]
)
def test_each_attack_is_refused_and_runs_nothing(
    run_dir: RunDir, tmp_path: Path, attack: Attack, reason: str
) -> None:
    canary, newest = tmp_path / "canary", run_dir.checkpoints / "step-20"
    attack(newest, canary)
    write_manifest(newest)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    checkpoint, warnings = find_checkpoint(run_dir)
    assert checkpoint is not None
    assert checkpoint.step == 10
    assert len(warnings) == 1
    assert warnings[0].isprintable()
    shutil.rmtree(run_dir.checkpoints / "step-10")
    with pytest.raises(CheckpointError, match=rf"step-20: {reason}") as caught:
        find_checkpoint(run_dir)
    assert str(caught.value).isprintable()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 200 * 1024
    assert not canary.exists()


def test_the_gadgets_are_live_ammunition(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    pickle_in_place_of_tensors(tmp_path, canary)
    pickle.loads((tmp_path / "student.safetensors").read_bytes())
    assert canary.exists()


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        (
            {"files": {"../step-10/student.safetensors": {"size": 1, "sha256": ""}}},
            "'../step-10/.*' is missing",
        ),
        ({"files": {"/etc/passwd": {"size": 1, "sha256": ""}}}, "'/etc/passwd' is missing"),
        ({"files": {"\x1b[31m": {"size": 1, "sha256": ""}}}, r"'\\x1b\[31m' is missing"),
        ({"files": {}}, r"state\.json is not in MANIFEST\.json"),
        ({"files": []}, r"MANIFEST\.json is not a manifest"),
        (
            {"files": {"state.json": {"size": "big", "sha256": ""}}},
            r"MANIFEST\.json is not a manifest",
        ),
        ({"step": [20]}, r"MANIFEST\.json is of step \[20\]"),
        ({"step": "\x1b[31m\n"}, r"MANIFEST\.json is of step '"),
        ({"padding": "x" * 2**21}, r"MANIFEST\.json is too large"),
    ],
)
def test_a_manifest_cannot_reach_out_of_its_folder_or_mislead(
    run_dir: RunDir, manifest: dict[str, object], reason: str
) -> None:
    write_manifest(run_dir.checkpoints / "step-20", **manifest)
    shutil.rmtree(run_dir.checkpoints / "step-10")
    with pytest.raises(CheckpointError, match=rf"step-20: {reason}") as caught:
        find_checkpoint(run_dir)
    assert str(caught.value).isprintable()


def test_a_folder_that_is_a_link_is_no_checkpoint(run_dir: RunDir, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (run_dir.checkpoints / "step-20").rename(outside)
    (run_dir.checkpoints / "step-20").symlink_to(outside)
    checkpoint, warnings = find_checkpoint(run_dir)
    assert checkpoint is not None
    assert checkpoint.step == 10
    assert "step-20 is skipped: it is a symbolic link" in warnings[0]
