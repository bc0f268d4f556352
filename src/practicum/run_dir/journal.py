"""Append-only files of JSON rows that survive crashes and full disks."""

import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from practicum.errors import CheckpointError
from practicum.run_dir.files import RESTORE, encode_json, parse_json, resource_error, shape_problem
from practicum.run_dir.shapes import STEPPED


class Journal:
    """One JSON object a line, handed to the system a whole line at a time.

    Opening an existing file cuts the line that a crash tore. When a row cannot be written, an `essential` journal
    raises ResourceError; any other drops the row and counts it in `dropped`, because losing a log is no reason to lose
    the training. Either way no half row stays. Non-ASCII text is escaped, so the file is safe to print anywhere.
    """

    def __init__(self, path: Path, *, essential: bool) -> None:
        self.path = path
        self.essential = essential
        self.dropped = 0
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._descriptor = os.open(path, flags, 0o666)
            self._size = _complete_size(self._descriptor)
            os.ftruncate(self._descriptor, self._size)
        except OSError as error:
            raise resource_error(f"{path} cannot be opened", error) from error

    def append(self, row: Mapping[str, object]) -> None:
        """Add one row. Its numbers must be finite: see `json_number`."""
        line = (encode_json(dict(row)) + "\n").encode("ascii")
        try:
            _write_all(self._descriptor, line)
        except OSError as error:
            os.ftruncate(self._descriptor, self._size)
            if self.essential:
                raise resource_error(f"{self.path} cannot take another row", error) from error
            self.dropped += 1
            return
        self._size += len(line)

    def truncate_after(self, step: int) -> int:
        """Cut the file at the first row of a later step; the number of rows cut.

        Rows after the last checkpoint are about work that a resumed run does again. Cutting them makes the file of the
        resumed run equal to that of an uninterrupted one, byte for byte.
        """
        cut = 0
        size = self._size
        for offset, row in _rows(self.path, STEPPED):
            if cut or row.get("step", step) > step:
                size = size if cut else offset
                cut += 1
        os.ftruncate(self._descriptor, size)
        self._size = size
        self.sync()
        return cut

    def sync(self) -> None:
        """Wait until every row is on the disk, so that a checkpoint never outlives the rows before it."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise resource_error(f"{self.path} cannot be synced", error) from error

    def close(self) -> None:
        """Let go of the file; closing twice is allowed."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_rows(path: Path, shape: TypeAdapter[Any] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a journal, oldest first, without a torn last line; CheckpointError where one has another shape."""
    for _, row in _rows(path, shape):
        yield row


def parse_row(
    path: Path, number: int, line: bytes, shape: TypeAdapter[Any] | None = None
) -> dict[str, Any]:
    """Return the row that is line `number` of a journal, counted from 1; CheckpointError where it has another shape."""
    row = _parse_row(line)
    if row is None:
        raise CheckpointError(
            f"{path} line {number} is not a JSON object; remove the line and try again"
        )
    problem = None if shape is None else shape_problem(line, shape)
    if problem is not None:
        raise CheckpointError(
            f"{path} line {number} is damaged ({problem}); put it back from a copy, or remove the line"
        )
    return row


def _rows(
    path: Path, shape: TypeAdapter[Any] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each whole row with the offset of its first byte."""
    offset = 0
    try:
        file = path.open("rb")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; {RESTORE}") from error
    with file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            yield offset, parse_row(path, number, line, shape)
            offset += len(line)


def _parse_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _complete_size(descriptor: int) -> int:
    """The size without the torn rows at the end: a line without an end, or one that a power cut filled with zeros."""
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


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
