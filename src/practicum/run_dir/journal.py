"""Append-only files of JSON rows that survive crashes and full disks."""

import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import TypeAdapter, ValidationError

from practicum.errors import CheckpointError
from practicum.run_dir.contents import JournalContents, JournalRecord
from practicum.run_dir.files import (
    RESTORE,
    build_resource_error,
    describe_mismatch,
    encode_json,
    parse_json,
)


class Journal:
    """A file with one JSON object per line, written a whole line at a time.

    Opening an existing file cuts a line that a crash tore. If a row cannot be written, an
    `essential` journal raises ResourceError. Any other drops the row and counts it in `dropped`,
    because losing a log is no reason to lose the training. In both cases, no partial row is left.
    Non-ASCII
    text is escaped, so the file is safe to print anywhere.
    """

    def __init__(self, path: Path, *, essential: bool, dropped: int = 0) -> None:
        self.path = path
        self.essential = essential
        self.dropped = dropped
        self._contents = JournalContents()
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._descriptor = os.open(path, flags, 0o666)
            self._size = _complete_size(self._descriptor)
            os.ftruncate(self._descriptor, self._size)
            with path.open("rb") as file:
                for line in file:
                    self._contents.add(line)
        except OSError as error:
            raise build_resource_error(f"{path} cannot be opened", error) from error

    def append(self, row: Mapping[str, object]) -> None:
        """Add one row. Its numbers must be finite."""
        self.append_line(encode_json(dict(row)).encode("ascii"))

    def append_line(self, text: bytes) -> None:
        """Add a row that is already encoded, such as a row of another program."""
        line = text + b"\n"
        try:
            _write_all(self._descriptor, line)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            if self.essential:
                raise build_resource_error(f"{self.path} cannot take another row", error) from error
            self.dropped += 1
            return
        self._size += len(line)
        self._contents.add(line)

    def record(self) -> JournalRecord:
        """Return the digests of the rows until now, for a checkpoint."""
        return self._contents.record(self.dropped)

    def sync(self) -> None:
        """Wait until all rows are on the disk, so no checkpoint outlives the rows before it."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise build_resource_error(f"{self.path} cannot be synced", error) from error

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def truncate_journal(path: Path, size: int) -> None:
    """Cut a journal to its first bytes; an absent file counts as an empty one.

    Rows after the last checkpoint are about work that a resumed run does again. Cutting them makes
    the file of the resumed run equal to the file of an uninterrupted run, byte for byte.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            os.ftruncate(descriptor, size)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise build_resource_error(f"{path} cannot be cut", error) from error


def read_rows(path: Path, shape: TypeAdapter[Any] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a journal, oldest first, without a torn last line.

    Raises CheckpointError at a row of another shape.
    """
    with open_journal(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            yield parse_row(path, number, line, shape)


def open_journal(path: Path) -> BinaryIO:
    """Open a journal to read its lines; CheckpointError if it cannot be opened."""
    try:
        return path.open("rb")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; {RESTORE}") from error


def parse_row(
    path: Path, number: int, line: bytes, shape: TypeAdapter[Any] | None = None
) -> dict[str, Any]:
    """Parse line `number` of a journal, counted from 1; CheckpointError if it has another shape."""
    row = _parse_row(line)
    if row is None:
        raise CheckpointError(
            f"{path} line {number} is not a JSON object; remove the line and try again"
        )
    if shape is None:
        return row
    try:
        shape.validate_json(line, strict=True)
    except ValidationError as error:
        raise CheckpointError(
            f"{path} line {number} is damaged ({describe_mismatch(error)}); "
            "put it back from a copy, or remove the line"
        ) from error
    return row


def _parse_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _complete_size(descriptor: int) -> int:
    """Return the size of the file up to the end of its last complete row."""
    # A crash leaves a line without its end; a power cut can leave one that is filled with zeros.
    size = os.fstat(descriptor).st_size
    if size == 0:
        return 0
    with mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) as text:
        end = text.rfind(b"\n") + 1
        while end > 0:
            start = text.rfind(b"\n", 0, end - 1) + 1
            if _parse_row(text[start:end]) is not None:
                break
            end = start
    return end


def _write_all(descriptor: int, line: bytes) -> None:
    # A signal or a nearly full disk lets the system take fewer bytes than it was given.
    view = memoryview(line)
    while view:
        view = view[os.write(descriptor, view) :]
