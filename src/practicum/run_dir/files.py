"""Replace files completely or not at all, read strict JSON, and remove without following links."""

import errno
import json
import math
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from practicum.core import strict_json
from practicum.core.strict_json import JsonError
from practicum.errors import CheckpointError, ResourceError
from practicum.run_dir.shaping import select_known

# A process that dies while it writes or removes leaves `NAME.tmp-PID` or `trash-NAME-PID`.
_DEBRIS = re.compile(r"(?:.+\.tmp|trash-.+)-([0-9]{1,9})")
_REMEDIES = {
    errno.ENOSPC: "free space and resume",
    errno.EDQUOT: "free space and resume",
    errno.EFBIG: "raise the file size limit (ulimit -f) and resume",
    errno.EACCES: "make it writable, or use another folder",
    errno.EPERM: "make it writable, or use another folder",
    errno.EROFS: "make it writable, or use another folder",
    errno.ENOENT: "the folder was moved or deleted; put it back and resume, or use another folder",
}
"""The remedies of failed system calls. Not every command has an option for another folder."""

RESTORE = "put it back from a copy, or start a new run"
"""The advice about a damaged file."""

DEEPEST = 100
"""The levels of a file of a run: a recipe's are up to 64, and others hold it."""


def to_json_number(number: float) -> float | None:
    """Return a number that strict JSON can represent: NaN and the infinities become None.

    Journals refuse numbers that are not finite, because other programs cannot read them. A caller
    that expects such a number calls this function.
    """
    return number if math.isfinite(number) else None


def encode_json(value: object, indent: int | None = None) -> str:
    """Encode a value as strict ASCII JSON; NaN or an infinity is a mistake of the calling code."""
    try:
        return json.dumps(value, allow_nan=False, indent=indent)
    except ValueError as error:
        raise AssertionError(
            f"{error}: pass numbers that may not be finite through json_number"
        ) from error


def parse_json(text: bytes) -> Any:
    """Parse strict JSON of a run; JsonError if the text is something else."""
    return strict_json.parse_json(text, DEEPEST)


def read_json(path: Path, shape: TypeAdapter[Any] | None = None) -> Any:
    """Read a JSON file of a run; CheckpointError if it is absent, damaged or of another shape."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}; is this a run's folder?"
        ) from error
    try:
        content = parse_json(text)
    except JsonError as error:
        raise CheckpointError(f"{path} is not JSON ({error}); {RESTORE}") from error
    if shape is None:
        return content
    try:
        return select_known(content, shape.validate_json(text, strict=True))
    except ValidationError as error:
        problem = describe_mismatch(error)
        raise CheckpointError(f"{path} is damaged ({problem}); {RESTORE}") from error


def describe_mismatch(error: ValidationError) -> str:
    """Describe in one line how a JSON text differs from its shape."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    # A key in the place is text of the file: ascii() keeps it from moving the cursor.
    return ascii(f"{place}: {first['msg']}" if place else first["msg"])[1:-1][:200]


def write_json(path: Path, value: object) -> None:
    """Replace the JSON file at `path`; after a crash it has either the old or the new content."""
    write_text(path, encode_json(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace the file at `path` as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replace the file at `path`: write and sync a temporary file in its folder, then rename it."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        write_synced(temporary, content)
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        raise build_resource_error(f"{path} cannot be written", error) from error
    finally:
        # On a read-only disk this also fails, and the first error has the reason.
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def prepare_folder(folder: Path) -> None:
    """Make a folder and write into it, so that a command fails before its work and not after it.

    Raises ResourceError if the folder cannot be made or takes no file.
    """
    probe = folder / f"probe.tmp-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise build_resource_error(f"{folder} cannot be written", error) from error


def write_synced(path: Path, content: bytes) -> None:
    """Write a file that must not exist yet and wait until it is on the disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until the file or folder at `path` is on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def build_resource_error(problem: str, error: OSError) -> ResourceError:
    """Return the error of a failed system call: the problem, the system's reason and the remedy."""
    remedy = _REMEDIES.get(error.errno or 0, "check the disk and try again")
    return ResourceError(f"{problem}: {error.strerror or error}; {remedy}")


def discard(path: Path) -> None:
    """Take `path` out of its folder in one rename, then remove it."""
    # Removing file by file under the old name could leave half a checkpoint when it is killed.
    trash = path.with_name(f"trash-{path.name}-{os.getpid()}")
    os.rename(path, trash)
    remove(trash)


def shorten_path(path: Path) -> str:
    """Return the path relative to the current folder if it lies inside it, otherwise unchanged."""
    folder = Path.cwd()
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def remove(path: Path) -> None:
    """Remove a file, a folder or a link; a link's target is not touched."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def remove_debris(folder: Path) -> None:
    """Remove the half-written files that dead processes left in `folder`."""
    # This process's own number counts as dead: inside a container the next process often has the
    # number of the last.
    for path in folder.iterdir():
        match = _DEBRIS.fullmatch(path.name)
        if match is not None and (int(match[1]) == os.getpid() or not is_alive(int(match[1]))):
            remove(path)


def is_alive(pid: int) -> bool:
    """Return True if a process of this machine is running."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    # To kill(), 0 and negative numbers are groups of processes, which may well exist.
    return pid > 0
