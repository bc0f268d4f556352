"""Digests of the files that determine a model's output; a resumed run compares them."""

import hashlib
import json
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

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


def digest_model(source: str, weights: bool = True) -> dict[str, str]:
    """Return the SHA-256 of each file of a model folder, such as `{"config.json": "5d0a...", ...}`.

    A hub name has one entry, `commit`: the cached snapshot, whose files do not change. Any other
    source, such as a model at a service, has its `name` only. An adapter folder has the entries of
    its base too, such as `base/config.json`. Without `weights`, leave the weights out.
    """
    folder = Path(source)
    if folder.is_dir():
        patterns = (WEIGHTS, *READING) if weights else READING
        # A set, since a file can match two patterns, as tokenizer.json does.
        files = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
        digests = {str(path.relative_to(folder)): digest_file(path) for path in sorted(files)}
        base = digest_model(find_base(source), weights) if is_adapter_folder(source) else {}
        return digests | {f"base/{name}": digest for name, digest in base.items()}
    commit = find_commit(source)
    return {"name": source} if commit is None else {"commit": f"{source}@{commit}"}


def compute_fingerprint(source: str) -> str:
    """Return one SHA-256 over all of `digest_model`."""
    # Paths are in the JSON beside their digests, so a renamed file counts as a change.
    return hashlib.sha256(json.dumps(digest_model(source)).encode()).hexdigest()


def find_commit(name: str) -> str | None:
    """Return the commit of a model in the hub's cache, or None if there is none."""
    try:
        # The folder of a snapshot in the hub's cache is named after its commit.
        return Path(snapshot_download(name, local_files_only=True)).name
    except (LocalEntryNotFoundError, HFValidationError):
        return None
