"""The files of a model that shape what it reads and answers, each with its digest: what a resumed run is held against."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

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
"""Architecture, generation settings, index of the weights, adapter settings, tokenizer, chat templates, and own code."""


def model_digests(source: str, weights: bool = True) -> dict[str, str]:
    """Return the SHA-256 of each file of a model folder by its name, for example `{"config.json": "5d0a...", ...}`.

    A hub name has one entry, `commit`: the snapshot in the cache that it stands for, whose files do not change. Anything
    else, such as a model at a service, is known by its `name` alone. Without `weights` only what shapes the reading counts.
    """
    folder = Path(source)
    if folder.is_dir():
        return {
            str(path.relative_to(folder)): file_digest(path) for path in _files(folder, weights)
        }
    commit = commit_of(source)
    return {"name": source} if commit is None else {"commit": f"{source}@{commit}"}


def fingerprint(source: str) -> str:
    """Return one SHA-256 over all of `model_digests`."""
    return hashlib.sha256(json.dumps(model_digests(source)).encode()).hexdigest()


def commit_of(name: str) -> str | None:
    """Return the commit of a model that was loaded from the hub, after which its folder in the cache is named."""
    try:
        return Path(snapshot_download(name, local_files_only=True)).name
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(folder: Path, weights: bool) -> Iterator[Path]:
    """Yield each file once, by name."""
    patterns = (WEIGHTS, *READING) if weights else READING
    yield from sorted(
        {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    )
