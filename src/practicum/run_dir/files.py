"""Replace files completely or not at all, read strict JSON, and remove without following links."""

import errno
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any, NoReturn

from pydantic import TypeAdapter, ValidationError

from practicum.core.options import spell_options
from practicum.errors import CheckpointError, ResourceError

# A process that dies while it writes or removes leaves `NAME.tmp-PID` or `trash-NAME-PID`.
_DEBRIS = re.compile(r"(?:.+\.tmp|trash-.+)-([0-9]{1,9})")
_REMEDIES = {
    errno.ENOSPC: "free space and resume",
    errno.EDQUOT: "free space and resume",
    errno.EFBIG: "raise the file size limit (ulimit -f) and resume",
    errno.EACCES: "make it writable or write {elsewhere}",
    errno.EPERM: "make it writable or write {elsewhere}",
    errno.EROFS: "make it writable or write {elsewhere}",
    errno.ENOENT: "the folder was moved or deleted; put it back and resume, or write {elsewhere}",
}
"""The remedies of failed system calls; `elsewhere` is the option that names another folder."""

RESTORE = "put it back from a copy, or start a new run"
"""The advice about a damaged file."""

MAX_DIGITS = 40
"""The digits of a whole number in a file of a run, at most: seeds have up to 19."""


def to_json_number(number: float) -> float | None:
    """Return a number that strict JSON can hold: NaN and the infinities become None.

    Journals refuse numbers that are not finite, because other programs cannot read them. A caller
    that expects one says so by calling this.
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
    """Parse strict JSON; ValueError if the text is something else."""
    try:
        return json.loads(
            text, parse_constant=_refuse_constant, parse_float=_parse_float, parse_int=_parse_int
        )
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _parse_float(text: str) -> float:
    # Python reads 1e999 as infinity, which encode_json would refuse to write again.
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:20]} is larger than any number")
    return number


def _parse_int(text: str) -> int:
    # The time to read a whole number grows with the square of its digits.
    if len(text) > MAX_DIGITS:
        raise ValueError(f"{text[:20]}... has {len(text)} digits")
    return int(text)


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
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}); {RESTORE}") from error
    problem = find_shape_problem(text, shape)
    if problem is not None:
        raise CheckpointError(f"{path} is damaged ({problem}); {RESTORE}")
    return content


def find_shape_problem(text: bytes, shape: TypeAdapter[Any] | None) -> str | None:
    """Describe in one line how a JSON text differs from a shape, or return None if it fits."""
    if shape is None:
        return None
    try:
        shape.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        # A key in the place is text of the file: ascii() keeps it from moving the cursor.
        return ascii(f"{place}: {first['msg']}" if place else first["msg"])[1:-1][:200]
    return None


def write_json(path: Path, value: object) -> None:
    """Replace the JSON file at `path`; after a crash it holds the old value or the new one."""
    write_text(path, encode_json(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace the file at `path`: write and sync a temporary file beside it, then rename it."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        write_synced(temporary, text)
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        raise build_resource_error(f"{path} cannot be written", error) from error
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


def build_resource_error(problem: str, error: OSError) -> ResourceError:
    """Return the error of a failed system call: the problem, the system's reason and the remedy."""
    remedy = _REMEDIES.get(error.errno or 0, "check the disk and resume")
    remedy = remedy.format(elsewhere=spell_options(out="another folder"))
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
