"""Files that are replaced whole or not at all, strict JSON, and removal that follows no link."""

import errno
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any, NoReturn

from pydantic import TypeAdapter, ValidationError

from practicum.errors import CheckpointError, ResourceError

# What is left when a process dies while writing or removing: `NAME.tmp-PID` and `trash-NAME-PID`.
_DEBRIS = re.compile(r"(?:.+\.tmp|trash-.+)-([0-9]{1,9})")
_REMEDIES = {
    errno.ENOSPC: "free space and resume",
    errno.EDQUOT: "free space and resume",
    errno.EFBIG: "raise the file size limit (ulimit -f) and resume",
    errno.EACCES: "make it writable or write --out another folder",
    errno.EPERM: "make it writable or write --out another folder",
    errno.EROFS: "make it writable or write --out another folder",
    errno.ENOENT: "the folder was moved or deleted; put it back and resume, or write --out another folder",
}


RESTORE = "put it back from a copy, or start a new run"
"""What to do about a file that is damaged."""


MOST_DIGITS = 40
"""Of a whole number in a file of a run: seeds have up to 19."""


def json_number(value: float) -> float | None:
    """A number that strict JSON can hold: NaN and the infinities become null, everything else stays.

    A number that is not finite has no meaning in a row that other programs read, and the journals refuse it, so the
    caller says here that it expects one.
    """
    return value if math.isfinite(value) else None


def encode_json(value: object, indent: int | None = None) -> str:
    """`value` as strict ASCII JSON; a NaN or an infinity in it is a mistake of ours, not of the user."""
    try:
        return json.dumps(value, allow_nan=False, indent=indent)
    except ValueError as error:
        raise AssertionError(
            f"{error}: pass numbers that may not be finite through json_number"
        ) from error


def parse_json(text: bytes) -> Any:
    """The value of a strict JSON text; ValueError if it is not one."""
    try:
        return json.loads(
            text, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_whole
        )
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    """Return the number; ValueError where it is larger than any."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is larger than any number")
    return value


def _whole(text: str) -> int:
    """Return the number; ValueError where it has more digits than any that we write."""
    if len(text) > MOST_DIGITS:
        raise ValueError(f"{text[:20]}... has {len(text)} digits")
    return int(text)


def read_json(path: Path, shape: TypeAdapter[Any] | None = None) -> Any:
    """Return the value in a JSON file of a run, which must be there, whole, and of the shape."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}; is this a run's folder?"
        ) from error
    try:
        value = parse_json(text)
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}); {RESTORE}") from error
    problem = None if shape is None else shape_problem(text, shape)
    if problem is not None:
        raise CheckpointError(f"{path} is damaged ({problem}); {RESTORE}")
    return value


def shape_problem(text: bytes, shape: TypeAdapter[Any]) -> str | None:
    """Return how a JSON text differs from the shape of its file, in one line, or None."""
    try:
        shape.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        return ascii(f"{place}: {first['msg']}" if place else first["msg"])[1:-1][:200]
    return None


def write_json(path: Path, value: object) -> None:
    """Replace the JSON file at `path`; after a crash it holds either the old value or the new one."""
    write_text(path, encode_json(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace the file at `path` by way of a synced temporary beside it."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        write_synced(temporary, text)
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        raise resource_error(f"{path} cannot be written", error) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_synced(path: Path, text: str) -> None:
    """Write a file that must not exist yet and wait until it is on the disk."""
    with path.open("x", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until the file or folder at `path` is on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def resource_error(what: str, error: OSError) -> ResourceError:
    """One line for a failed system call: `what`, the system's reason and the remedy."""
    remedy = _REMEDIES.get(error.errno or 0, "check the disk and resume")
    return ResourceError(f"{what}: {error.strerror or error}; {remedy}")


def discard(path: Path) -> None:
    """Take `path` out of its folder in one rename, then remove it."""
    trash = path.with_name(f"trash-{path.name}-{os.getpid()}")
    os.rename(path, trash)
    remove(trash)


def near(path: Path) -> str:
    """Return the path as a person would type it here."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def remove(path: Path) -> None:
    """Remove a file, a folder or a link; a link's target is not touched."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def remove_debris(folder: Path) -> None:
    """Remove what processes that no longer live left half-written in `folder`.

    Our own number counts as dead: inside a container the next process often has the number of the last.
    """
    for path in folder.iterdir():
        match = _DEBRIS.fullmatch(path.name)
        if match is not None and (int(match[1]) == os.getpid() or not is_alive(int(match[1]))):
            remove(path)


def is_alive(pid: int) -> bool:
    """Return whether a process of this machine goes on."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return pid > 0
