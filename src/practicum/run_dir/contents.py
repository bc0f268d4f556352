"""Verify that a journal still holds the rows it held when a checkpoint was saved."""

import hashlib
import zlib
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from practicum.errors import CheckpointError
from practicum.run_dir.files import RESTORE

MAX_MARKS = 512
"""The most marks of a journal. Each narrows a damage down to the lines between two marks."""

Count = Annotated[int, Field(ge=0, lt=2**53)]


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """The content of a journal at a checkpoint.

    `sha256` is the digest of all bytes. `marks` are the running CRC-32 sums after every `spacing`
    rows. `lost_rows` is the number of rows that could not be written.
    """

    rows: Count = 0
    size: Count = 0
    sha256: str = hashlib.sha256().hexdigest()
    spacing: Annotated[int, Field(ge=1)] = 1
    marks: tuple[Count, ...] = ()
    lost_rows: Count = 0


RECORDS = TypeAdapter(dict[str, JournalRecord])
"""The records of all journals by the name of the file."""


class JournalContents:
    """The digests of a journal, updated with each row."""

    def __init__(self) -> None:
        self._rows = self._size = self._crc = 0
        self._sha = hashlib.sha256()
        self._spacing = 1
        self._marks: list[int] = []

    def add(self, line: bytes) -> None:
        """Add a row with its newline."""
        self._rows += 1
        self._size += len(line)
        self._sha.update(line)
        self._crc = zlib.crc32(line, self._crc)
        if self._rows % self._spacing == 0:
            self._marks.append(self._crc)
            if len(self._marks) > MAX_MARKS:
                self._marks = self._marks[1::2]
                self._spacing *= 2

    def record(self, lost_rows: int) -> JournalRecord:
        """Return the record of all rows until now."""
        return JournalRecord(
            rows=self._rows,
            size=self._size,
            sha256=self._sha.hexdigest(),
            spacing=self._spacing,
            marks=tuple(self._marks),
            lost_rows=lost_rows,
        )


def check_journal(path: Path, saved: JournalRecord) -> None:
    """Raise CheckpointError, with the line, unless a journal begins with the rows of a record."""
    problem = _find_damage(path, saved)
    if problem is not None:
        raise CheckpointError(f"{path} {problem}; {RESTORE}")


def _find_damage(path: Path, saved: JournalRecord) -> str | None:
    if not saved.rows:
        return None
    sha, crc, good, count = hashlib.sha256(), 0, 0, 0
    try:
        with path.open("rb") as file:
            for line in file:
                count += 1
                sha.update(line)
                crc = zlib.crc32(line, crc)
                if count % saved.spacing == 0:
                    if saved.marks[count // saved.spacing - 1 :][:1] != (crc,):
                        break
                    good = count
                if count == saved.rows:
                    break
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if count == saved.rows and sha.hexdigest() == saved.sha256:
        return None
    if good == count < saved.rows:
        return f"ends after line {count}, and the run had written {saved.rows} lines"
    lines = f"line {count} differs" if good + 1 >= count else f"lines {good + 1} to {count} differ"
    return f"{lines} from the lines that the run wrote"
