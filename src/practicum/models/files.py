"""Read the files of a model folder: their digests and their JSON."""

import hashlib
import json
from pathlib import Path
from typing import Any

from practicum.errors import ModelError


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_settings(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file. Raises ModelError if the file holds no mapping."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: not JSON ({error}); copy the file again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: not a mapping of names to values; copy the file again")
    return content
