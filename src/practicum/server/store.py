"""Checkpoints by their `tinker://` address: each a folder of hashed files that is there whole or not at all.

ROOT/RUN/run.json
ROOT/RUN/weights/NAME/checkpoints/step-1/           to train on: adapters and moments
ROOT/RUN/sampler_weights/NAME/checkpoints/step-1/   to sample from: adapters
"""

import contextlib
import json
import os
import re
import stat
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from torch import Tensor

from practicum.errors import CheckpointError, DataError
from practicum.run_dir import (
    Checkpoint,
    RunDir,
    find_checkpoint,
    read_json,
    save_checkpoint,
    write_json,
)
from practicum.run_dir.checkpoints import CheckpointDamage, check_manifest, step_folders
from practicum.run_dir.files import discard

EXPIRY = "expires.json"
"""In the folder of a checkpoint: when it is to be removed."""

KINDS = ("weights", "sampler_weights")
_RUN = r"[A-Za-z0-9-]{1,64}:train:[0-9]{1,9}"
_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,79}"
_ADDRESS = re.compile(rf"tinker://({_RUN})/({'|'.join(KINDS)})/({_NAME})")


@dataclass(frozen=True, slots=True)
class CheckpointAddress:
    """Where a checkpoint is: the training run, the kind, the name."""

    run: str
    kind: str
    name: str

    @classmethod
    def read(cls, text: str) -> "CheckpointAddress":
        """From `tinker://RUN/weights/NAME`; DataError where it is not one."""
        match = _ADDRESS.fullmatch(text)
        if match is None:
            raise DataError(
                f"{text!a:.120} is not the address of a checkpoint here, such as tinker://RUN/weights/NAME with a name of "
                "letters, digits, dots, dashes and underscores"
            )
        return cls(*match.groups())

    def __str__(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"


class Store:
    """The checkpoints under one folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._removing = threading.Lock()

    def save(
        self,
        address: CheckpointAddress,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
        *,
        overwrite: bool,
        lifetime: int | None = None,
    ) -> None:
        """Write a checkpoint, to be removed after `lifetime` seconds; DataError where one is there and is to stay.

        What has expired in the same run is removed.
        """
        self.addresses(address.run)
        folder = self._folder(address)
        run_dir = RunDir(folder)
        version = 1
        if folder.exists():
            existing, _ = find_checkpoint(run_dir)
            if existing is not None and not overwrite:
                raise DataError(
                    f"there is a checkpoint {address} already; give another name or overwrite it"
                )
            version = 1 if existing is None else existing.step + 1
        else:
            run_dir = RunDir.create(folder.parent, address.name)
        save_checkpoint(run_dir, version, tensors, {**state, "step": version}, keep=1)
        self.set_lifetime(address, lifetime)

    def set_lifetime(self, address: CheckpointAddress, seconds: int | None) -> None:
        """Let a checkpoint be removed so many seconds from now, or stay; CheckpointError where there is none."""
        folder = self._there(address)
        if seconds is None:
            (folder / EXPIRY).unlink(missing_ok=True)
        else:
            write_json(
                folder / EXPIRY,
                {"at": (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()},
            )

    def copy(
        self, source: CheckpointAddress, target: CheckpointAddress, lifetime: int | None = None
    ) -> None:
        """Write a verified checkpoint again under another address; CheckpointError where it is missing or damaged."""
        checkpoint = self.load(str(source))
        stems = ("student", "optimizer") if source.kind == "weights" else ("student",)
        tensors = {stem: checkpoint.tensors(stem) for stem in stems}
        self.save(target, tensors, checkpoint.state, overwrite=True, lifetime=lifetime)

    def load(self, text: str) -> Checkpoint:
        """The checkpoint at an address, every file verified; CheckpointError where it is missing or damaged."""
        address = CheckpointAddress.read(text)
        checkpoint, _ = find_checkpoint(RunDir(self._there(address)))
        if checkpoint is None:
            raise CheckpointError(f"there is no checkpoint {address}; {self._others(address)}")
        return checkpoint

    def state(self, text: str) -> dict[str, Any]:
        """What a checkpoint says of itself, without reading its tensors; CheckpointError where there is none."""
        address = CheckpointAddress.read(text)
        for step, path in step_folders(RunDir(self._there(address)).checkpoints):
            try:
                check_manifest(path, step)
            except CheckpointDamage:
                continue
            return read_json(path / "state.json")
        raise CheckpointError(f"there is no checkpoint {address}; {self._others(address)}")

    def delete(self, address: CheckpointAddress) -> None:
        """Remove a checkpoint."""
        self._remove(self._there(address))

    def write_run(self, run: str, data: Mapping[str, Any]) -> None:
        """Say what a run is, once it has something to keep."""
        folder = self._run_folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "run.json", dict(data))

    def read_run(self, run: str) -> tuple[dict[str, Any], datetime] | None:
        """What was written about a run, and when; None where nothing was."""
        if re.fullmatch(_RUN, run) is None:
            return None
        path = self._run_folder(run) / "run.json"
        if not path.is_file():
            return None
        return read_json(path), datetime.fromtimestamp(path.stat().st_mtime, UTC)

    def runs(self) -> list[str]:
        """All runs that kept something."""
        found = [path.parent.name.replace(".", ":") for path in self._root.glob("*/run.json")]
        return sorted(run for run in found if re.fullmatch(_RUN, run))

    def addresses(self, run: str) -> list[tuple[CheckpointAddress, datetime, int]]:
        """The checkpoints of a run with their times and sizes, oldest first; what has expired is removed."""
        found = []
        for kind in KINDS:
            for folder in (self._run_folder(run) / kind).glob("*"):
                if _expired(folder):
                    self._remove(folder)
                    continue
                files = _stats(folder.glob("checkpoints/step-*/*"))
                if files and re.fullmatch(_NAME, folder.name):
                    changed = max(file.st_mtime for file in files)
                    size = sum(file.st_size for file in files)
                    found.append(
                        (
                            CheckpointAddress(run, kind, folder.name),
                            datetime.fromtimestamp(changed, UTC),
                            size,
                        )
                    )
        return sorted(found, key=lambda row: (row[1], str(row[0])))

    def _others(self, address: CheckpointAddress) -> str:
        names = [
            other.name for other, _, _ in self.addresses(address.run) if other.kind == address.kind
        ]
        return f"the run has {', '.join(names[-8:])}" if names else "the run has none of that kind"

    def _remove(self, folder: Path) -> None:
        """Remove a folder, which another thread may be removing too."""
        with self._removing:
            if folder.is_dir():
                discard(folder)

    def expiry(self, address: CheckpointAddress) -> datetime | None:
        """Return when a checkpoint will be removed; None where it stays."""
        return _expiry(self._folder(address))

    def _there(self, address: CheckpointAddress) -> Path:
        """Return the folder of a checkpoint; CheckpointError where there is none, or it has expired."""
        folder = self._folder(address)
        if not folder.is_dir() or _expired(folder):
            raise CheckpointError(f"there is no checkpoint {address}; {self._others(address)}")
        return folder

    def _folder(self, address: CheckpointAddress) -> Path:
        return self._run_folder(address.run) / address.kind / address.name

    def _run_folder(self, run: str) -> Path:
        return self._root / run.replace(":", ".")


def _stats(paths: Iterable[Path]) -> list[os.stat_result]:
    """Return what the system says of the files among the paths; those that are being replaced are left out."""
    found = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            found.append(path.stat())
    return [file for file in found if stat.S_ISREG(file.st_mode)]


def _expiry(folder: Path) -> datetime | None:
    try:
        text = (folder / EXPIRY).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    return datetime.fromisoformat(json.loads(text)["at"])


def _expired(folder: Path) -> bool:
    at = _expiry(folder)
    return at is not None and at <= datetime.now(UTC)
