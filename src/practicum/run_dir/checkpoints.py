"""Find a checkpoint with files that all match the sizes and SHA-256 sums of its manifest.

The sums are needed because tensors with a flipped bit load without an error.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from practicum.core.options import spell_options
from practicum.errors import CheckpointError
from practicum.models.files import digest_file
from practicum.models.tensors import read_tensors
from practicum.run_dir.contents import RECORDS, JournalRecord
from practicum.run_dir.files import parse_json
from practicum.run_dir.folder import RunDir

MANIFEST = "MANIFEST.json"
JOURNALS = "journals.json"
"""The file of a checkpoint with the digests of the run's journals."""

# `step-N.old-K` is the earlier save of step N, which exists only between the renames of a new one.
_FOLDER = re.compile(r"step-(0|[1-9][0-9]{0,17})(\.old-[0-9]+)?")
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_MAX_MANIFEST_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint with verified files, and its step, state and versions.

    `journals` are the records of the run's journals by name, empty if it has none.
    """

    path: Path
    step: int
    state: dict[str, Any]
    versions: dict[str, Any]
    journals: dict[str, JournalRecord]

    def read_tensors(self, stem: str) -> dict[str, Tensor]:
        """Read the tensors of one file, onto the CPU."""
        return read_tensors(self.path / f"{stem}.safetensors")


class CheckpointDamage(Exception):
    """The reason why a folder is no usable checkpoint."""


def find_checkpoint(
    run_dir: RunDir, only_step: int | None = None
) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest valid checkpoint, and a warning for each newer one that is damaged.

    With `only_step`, only its checkpoint is considered. Returns None without a checkpoint; raises
    CheckpointError if all are damaged.
    """
    reasons: list[tuple[Path, str]] = []
    for step, path in step_folders(run_dir.checkpoints):
        if only_step not in (None, step):
            continue
        try:
            checkpoint = _verify(path, step)
        except CheckpointDamage as damage:
            reasons.append((path, str(damage)))
        else:
            return checkpoint, [
                f"checkpoint {path} is skipped: {reason}" for path, reason in reasons
            ]
    if reasons:
        listed = "; ".join(f"{path.name}: {reason}" for path, reason in reasons)
        raise CheckpointError(
            f"no checkpoint in {run_dir.checkpoints} can be used ({listed}); "
            f"restore one from a copy, or start again with {spell_options(out='another folder')}"
        )
    return None, []


def step_folders(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield the step and path of everything named like a checkpoint, newest first."""
    if not folder.is_dir():
        return
    folders = [
        (int(match[1]), match[2] is None, path)
        for path in folder.iterdir()
        if (match := _FOLDER.fullmatch(path.name))
    ]
    # The latest save of a step comes before the earlier one that it replaces.
    for step, _, path in sorted(folders, key=lambda folder: folder[:2], reverse=True):
        yield step, path


def check_manifest(path: Path, step: int) -> dict[str, str]:
    """Return the SHA-256 sum of each file, after every check that does not read the files.

    Raises CheckpointDamage if the manifest is absent, of another step, or names other sizes.
    """
    try:
        sizes = _read_sizes(path)
        if sizes.get(MANIFEST, 0) > _MAX_MANIFEST_BYTES:
            raise CheckpointDamage(f"{MANIFEST} is too large to be one")
        manifest = parse_json((path / MANIFEST).read_bytes())
        saved_step, entries = manifest["step"], manifest["files"].items()
        sums = {name: str(entry["sha256"]) for name, entry in entries}
        expected = {name: int(entry["size"]) for name, entry in entries}
    except FileNotFoundError as error:
        raise CheckpointDamage(f"{MANIFEST} is missing") from error
    except OSError as error:
        raise CheckpointDamage(f"cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointDamage(f"{MANIFEST} is not a manifest") from error
    if saved_step != step:
        raise CheckpointDamage(f"{MANIFEST} is of step {saved_step!a:.40}")
    for name, size in expected.items():
        # The name comes from the file: it must not lead out of the folder.
        if FILE_NAME.fullmatch(name) is None or name not in sizes:
            raise CheckpointDamage(f"{name!a} is missing")
        if sizes[name] != size:
            raise CheckpointDamage(f"{name} has {sizes[name]} bytes, {MANIFEST} says {size}")
    return sums


def is_complete(path: Path, step: int) -> bool:
    """Return True if a folder is the checkpoint of a step by `check_manifest`."""
    try:
        check_manifest(path, step)
    except CheckpointDamage:
        return False
    return True


def _read_sizes(path: Path) -> dict[str, int]:
    """Return the size of each file in a checkpoint; CheckpointDamage unless all are plain files."""
    if path.is_symlink():
        raise CheckpointDamage("it is a symbolic link")
    sizes = {}
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_symlink():
                raise CheckpointDamage(f"{entry.name!a} is a symbolic link")
            if not entry.is_file():
                raise CheckpointDamage(f"{entry.name!a} is not a plain file")
            sizes[entry.name] = entry.stat().st_size
    return sizes


def _verify(path: Path, step: int) -> Checkpoint:
    """Read every file of a checkpoint once and compare it with the manifest."""
    sums = check_manifest(path, step)
    for name, expected in sums.items():
        try:
            if digest_file(path / name) != expected:
                raise CheckpointDamage(f"{name} does not match its SHA-256 sum")
            if name.endswith(".safetensors"):
                with safe_open(path / name, framework="pt"):
                    pass
        except OSError as error:
            raise CheckpointDamage(f"{name} cannot be read: {error.strerror}") from error
        except SafetensorError as error:
            raise CheckpointDamage(
                f"{name} is not a safetensors file ({str(error)!a:.200})"
            ) from error
    state, versions = (_read_object(path, name, sums) for name in ("state.json", "versions.json"))
    if state.get("step") != step:
        raise CheckpointDamage(f"state.json is of step {state.get('step')!a:.40}")
    return Checkpoint(path, step, state, versions, _read_journals(path, sums))


def _read_journals(path: Path, sums: Mapping[str, str]) -> dict[str, JournalRecord]:
    if JOURNALS not in sums:
        return {}
    try:
        return RECORDS.validate_json((path / JOURNALS).read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointDamage(f"{JOURNALS} cannot be read: {type(error).__name__}") from error


def _read_object(path: Path, name: str, sums: Mapping[str, str]) -> dict[str, Any]:
    if name not in sums:
        raise CheckpointDamage(f"{name} is not in {MANIFEST}")
    try:
        content = parse_json((path / name).read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointDamage(f"{name} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointDamage(f"{name} is not a JSON object")
    return content
