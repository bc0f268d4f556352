"""Digests of the files that determine a model's output.

A run records them before its first load. Every process that loads the model compares its files with
the record, and a resumed run compares its record with the record in recipe.json.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from practicum.errors import ModelError
from practicum.models.files import digest_file
from practicum.models.sources import find_base, is_adapter_folder

WEIGHTS = "*.safetensors"
"""The weights of a model and of its adapters."""

READING = (
    "*.json",
    "*.jinja",
    "*.model",
    "*.py",
    "tokenizer*",
    "chat_template*",
    "vocab*",
    "merges*",
    "additional_chat_templates/*",
)
"""Architecture, generation and adapter settings, weight index, tokenizer, templates, and code."""

READERS = min(8, os.cpu_count() or 1)
"""The files that are read at the same time; their digests take longer than reading them."""


class Stamp(NamedTuple):
    """The size, modification time and inode of a file, which change if the file is replaced."""

    size: int
    time: int
    inode: int

    @classmethod
    def read(cls, path: Path) -> "Stamp":
        """Return the current stamp of a file."""
        status = path.stat()
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """The files of a model as a run recorded them.

    `digests` has the entries of `digest_model`; of a model on the hub, its commit after the first
    load. `stamps` has the stamp of each file by the same names.
    """

    source: str
    digests: Mapping[str, str]
    stamps: Mapping[str, Stamp]

    def check(self, *, thorough: bool, share: tuple[int, int] = (0, 1)) -> None:
        """Raise ModelError if a file differs from the record.

        With `thorough`, compare the digest of each file, otherwise only if the file's stamp differs.
        `share` is (k, n): processes that see the same files divide them, and process k of n reads
        every n-th file.
        """
        paths = list_files(self.source)
        changed = sorted(paths.keys() ^ self.stamps.keys())
        if changed:
            raise self._refuse(changed[0], "is missing" if changed[0] in self.stamps else "is new")
        index, count = share
        suspects = {
            name: paths[name]
            for name in sorted(paths)[index::count]
            if thorough or Stamp.read(paths[name]) != self.stamps[name]
        }
        for name, digest in digest_files(suspects).items():
            if digest != self.digests[name]:
                reason = f"has SHA-256 {digest[:12]} instead of {self.digests[name][:12]}"
                raise self._refuse(name, reason)

    def confirm(self) -> "ModelRecord":
        """Return the record of a model that was just loaded, with the commit of a hub model.

        Raises ModelError if its files or its commit changed.
        """
        self.check(thorough=False)
        versions = name_versions(self.source)
        for name, version in versions.items():
            if version != self.digests.get(name, version):
                raise self._refuse(name, f"is {version} instead of {self.digests[name]}")
        return replace(self, digests={**self.digests, **versions})

    def require_equal(self, loaded: Iterable["ModelRecord"]) -> None:
        """Raise ModelError if other processes loaded another version of the model."""
        for record in loaded:
            for name, digest in self.digests.items():
                if (loaded_digest := record.digests.get(name)) != digest:
                    reason = f"is {loaded_digest} in one process and {digest} in another"
                    raise self._refuse(name, reason)

    def _refuse(self, name: str, reason: str) -> ModelError:
        return ModelError(
            f"{self.source}: {name} {reason}, so the model differs from the model that the run "
            "recorded; restore the earlier files, or start a new run"
        )


def record_model(source: str) -> ModelRecord:
    """Record the files of a model folder before they are loaded.

    The commit of a model on the hub is not known before its load; `ModelRecord.confirm` adds it.
    Raises ModelError if a file changes meanwhile.
    """
    files = list_files(source)
    stamps = {name: Stamp.read(path) for name, path in files.items()}
    record = ModelRecord(source, digest_files(files), stamps)
    if stamps != {name: Stamp.read(path) for name, path in files.items()}:
        raise ModelError(
            f"{source}: its files changed while they were read; wait until they are written, then "
            "start again"
        )
    return record


def digest_model(source: str, weights: bool = True) -> dict[str, str]:
    """Return the SHA-256 of each file of a model folder, such as `{"config.json": "5d0a...", ...}`.

    A hub name has one entry, `commit`: the files of a cached snapshot do not change. Any other
    source, such as a model at a service, only has its `name`. An adapter folder also has the
    entries of its base, such as `base/config.json`. Without `weights`, leave the weights out.
    """
    return digest_files(list_files(source, weights)) | name_versions(source)


def list_files(source: str, weights: bool = True) -> dict[str, Path]:
    """Return the files of a model folder, and of its base, by the names of `digest_model`."""
    folder = Path(source)
    if not folder.is_dir():
        return {}
    patterns = (WEIGHTS, *READING) if weights else READING
    # A set, since a file can match two patterns, as tokenizer.json does.
    files = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    base = list_files(find_base(source), weights) if is_adapter_folder(source) else {}
    names = {str(path.relative_to(folder)): path for path in sorted(files)}
    return names | {f"base/{name}": path for name, path in base.items()}


def digest_files(files: Mapping[str, Path]) -> dict[str, str]:
    """Return the SHA-256 of each file under its name."""
    with ThreadPoolExecutor(READERS) as readers:
        return dict(zip(files, readers.map(digest_file, files.values()), strict=True))


def name_versions(source: str) -> dict[str, str]:
    """Return the commit or the name of a model that is in no folder; of an adapter, its base's."""
    if Path(source).is_dir():
        base = name_versions(find_base(source)) if is_adapter_folder(source) else {}
        return {f"base/{name}": version for name, version in base.items()}
    commit = find_commit(source)
    return {"name": source} if commit is None else {"commit": f"{source}@{commit}"}


def compute_fingerprint(source: str) -> str:
    """Return one SHA-256 over all of `digest_model`."""
    # The JSON holds paths in addition to digests, so a renamed file counts as a change.
    return hashlib.sha256(json.dumps(digest_model(source)).encode()).hexdigest()


def find_revision(model: str) -> str | None:
    """Return a model's version: its commit on the hub, or the time when it was written.

    The digest of the weights would take minutes for a large model.
    """
    times = [path.stat().st_mtime for path in Path(model).expanduser().glob("*.safetensors")]
    if times:
        return f"written {datetime.fromtimestamp(max(times), UTC):%Y-%m-%d %H:%M:%S} UTC"
    commit = find_commit(model)
    return None if commit is None else f"commit {commit[:12]}"


def find_commit(name: str) -> str | None:
    """Return the commit of a model in the hub's cache, or None if it is not cached."""
    try:
        # The folder of a snapshot in the hub's cache is named after its commit.
        return Path(snapshot_download(name, local_files_only=True)).name
    except (LocalEntryNotFoundError, HFValidationError):
        return None
