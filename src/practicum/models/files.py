"""Read the files of a model folder, and write a complete folder or nothing."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError

from practicum.errors import ModelError, ResourceError


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_settings(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file. Raises ModelError if the file holds no mapping."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    # Also deep nesting, and numbers with more digits than Python reads.
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON ({error}); copy the file again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: not a mapping of names to values; copy the file again")
    return content


@contextmanager
def name_when_complete(folder: Path) -> Iterator[Path]:
    """Yield a folder of the same name to write, and move it to `folder` if the block succeeds.

    Otherwise nothing of it is kept. Raises ResourceError if the disk is full or read-only, or if
    `folder` exists by then and is not empty.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f"{folder.name}.tmp-", dir=folder.parent) as temporary:
            staging = Path(temporary) / folder.name
            yield staging
            staging.rename(folder)
    except ResourceError:
        raise
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise ResourceError(
            f"{folder}: cannot be written ({reason or error}), and nothing of it was kept; free space "
            "there, make it writable, or name another folder"
        ) from error
