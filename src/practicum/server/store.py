"""Store checkpoints by their `tinker://` address, each a complete folder of hashed files.

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
"""The file in a checkpoint's folder with the time at which the checkpoint expires."""

KINDS = ("weights", "sampler_weights")
_RUN = r"[A-Za-z0-9-]{1,64}:train:[0-9]{1,9}"
_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,79}"
_ADDRESS = re.compile(rf"tinker://({_RUN})/({'|'.join(KINDS)})/({_NAME})")


@dataclass(frozen=True, slots=True)
class CheckpointAddress:
    """The address of a checkpoint: the training run, the kind and the name."""

    run: str
    kind: str
    name: str

    @classmethod
    def read(cls, text: str) -> "CheckpointAddress":
        """Parse `tinker://RUN/weights/NAME`; raise DataError if the text is no address."""
        match = _ADDRESS.fullmatch(text)
        if match is None:
            raise DataError(
                f"{text!a:.120} is not the address of a checkpoint here, "
                "such as tinker://RUN/weights/NAME with a name of letters, digits, dots, dashes and underscores"
            )
        return cls(*match.groups())

    def __str__(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"


class Store:
    """The checkpoints in one folder."""

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
        """Write a checkpoint that expires after `lifetime` seconds; delete expired ones of the
        run.

        Raise DataError if the checkpoint exists and must not be overwritten.
        """
        self.list_checkpoints(address.run)
        folder = self._get_folder(address)
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
        # A new version is complete on disk before the old one goes, so a crash leaves one of them.
        save_checkpoint(run_dir, version, tensors, {**state, "step": version}, keep=1)
        # Without a lifetime too: an overwritten version may have left an expiry.
        self.set_lifetime(address, lifetime)

    def set_lifetime(self, address: CheckpointAddress, seconds: int | None) -> None:
        """Let a checkpoint expire after `seconds`; None keeps it.

        Raise CheckpointError if the checkpoint does not exist.
        """
        folder = self._find_folder(address)
        if seconds is None:
            (folder / EXPIRY).unlink(missing_ok=True)
        else:
            expiry = datetime.now(UTC) + timedelta(seconds=seconds)
            write_json(folder / EXPIRY, {"at": expiry.isoformat()})

    def copy(
        self, source: CheckpointAddress, target: CheckpointAddress, lifetime: int | None = None
    ) -> None:
        """Verify a checkpoint and write it to another address.

        Raise CheckpointError if it is missing or damaged.
        """
        checkpoint = self.load(str(source))
        stems = ("student", "optimizer") if source.kind == "weights" else ("student",)
        tensors = {stem: checkpoint.read_tensors(stem) for stem in stems}
        self.save(target, tensors, checkpoint.state, overwrite=True, lifetime=lifetime)

    def load(self, text: str) -> Checkpoint:
        """Return the checkpoint at an address, every file verified.

        Raise CheckpointError if it is missing or damaged.
        """
        address = CheckpointAddress.read(text)
        checkpoint, _ = find_checkpoint(RunDir(self._find_folder(address)))
        if checkpoint is None:
            raise self._build_missing_error(address)
        return checkpoint

    def read_state(self, text: str) -> dict[str, Any]:
        """Return the state of a checkpoint without reading its tensors.

        Raise DataError if the address is malformed, CheckpointError if there is no checkpoint.
        """
        address = CheckpointAddress.read(text)
        for step, path in step_folders(RunDir(self._find_folder(address)).checkpoints):
            try:
                check_manifest(path, step)
            except CheckpointDamage:
                continue
            return read_json(path / "state.json")
        raise self._build_missing_error(address)

    def delete(self, address: CheckpointAddress) -> None:
        """Delete a checkpoint."""
        self._remove(self._find_folder(address))

    def write_run(self, run: str, description: Mapping[str, Any]) -> None:
        """Write the description of a run, before its first checkpoint."""
        folder = self._get_run_folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "run.json", dict(description))

    def read_run(self, run: str) -> tuple[dict[str, Any], datetime] | None:
        """Return the description of a run and the time of its writing, or None."""
        if re.fullmatch(_RUN, run) is None:
            return None
        path = self._get_run_folder(run) / "run.json"
        if not path.is_file():
            return None
        return read_json(path), datetime.fromtimestamp(path.stat().st_mtime, UTC)

    def list_runs(self) -> list[str]:
        """Return all runs with a description."""
        runs = [path.parent.name.replace(".", ":") for path in self._root.glob("*/run.json")]
        return sorted(run for run in runs if re.fullmatch(_RUN, run))

    def list_checkpoints(self, run: str) -> list[tuple[CheckpointAddress, datetime, int]]:
        """Return address, time and bytes of each checkpoint, oldest first; delete expired ones.

        Raise CheckpointError if no run can have the name.
        """
        rows = []
        for kind in KINDS:
            for folder in (self._get_run_folder(run) / kind).glob("*"):
                if _is_expired(folder):
                    self._remove(folder)
                    continue
                files = _collect_stats(folder.glob("checkpoints/step-*/*"))
                if files and re.fullmatch(_NAME, folder.name):
                    address = CheckpointAddress(run, kind, folder.name)
                    changed = datetime.fromtimestamp(max(file.st_mtime for file in files), UTC)
                    rows.append((address, changed, sum(file.st_size for file in files)))
        return sorted(rows, key=lambda row: (row[1], str(row[0])))

    def _build_missing_error(self, address: CheckpointAddress) -> CheckpointError:
        siblings = (sibling for sibling, _, _ in self.list_checkpoints(address.run))
        names = [sibling.name for sibling in siblings if sibling.kind == address.kind]
        stored_names = ", ".join(names[-8:]) or "none of that kind"
        return CheckpointError(f"there is no checkpoint {address}; the run has {stored_names}")

    def _remove(self, folder: Path) -> None:
        """Remove a folder that another thread may be removing too."""
        with self._removing:
            if folder.is_dir():
                discard(folder)

    def read_expiry(self, address: CheckpointAddress) -> datetime | None:
        """Return the time at which a checkpoint expires; None if it stays."""
        return _read_expiry(self._get_folder(address))

    def _find_folder(self, address: CheckpointAddress) -> Path:
        """Return the folder of a checkpoint; raise CheckpointError if it is missing or expired."""
        folder = self._get_folder(address)
        if not folder.is_dir() or _is_expired(folder):
            raise self._build_missing_error(address)
        return folder

    def _get_folder(self, address: CheckpointAddress) -> Path:
        return self._get_run_folder(address.run) / address.kind / address.name

    def _get_run_folder(self, run: str) -> Path:
        """Return the folder of a run; raise CheckpointError if no run can have the name."""
        # A name such as `::` would otherwise lead out of the root.
        if re.fullmatch(_RUN, run) is None:
            raise CheckpointError(f"there is no training run {run!a:.120}")
        # Not every file system has colons in names; no run has a dot in its own, see `_RUN`.
        return self._root / run.replace(":", ".")


def _collect_stats(paths: Iterable[Path]) -> list[os.stat_result]:
    """Return the status of the regular files among the paths."""
    files = []
    for path in paths:
        # Another thread may be replacing the checkpoint.
        with contextlib.suppress(FileNotFoundError):
            files.append(path.stat())
    return [file for file in files if stat.S_ISREG(file.st_mode)]


def _read_expiry(folder: Path) -> datetime | None:
    try:
        text = (folder / EXPIRY).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    return datetime.fromisoformat(json.loads(text)["at"])


def _is_expired(folder: Path) -> bool:
    expiry = _read_expiry(folder)
    return expiry is not None and expiry <= datetime.now(UTC)
