"""Read files as rows: JSON Lines, a JSON list, CSV, TSV and Parquet, chosen by the file's suffix."""

import csv
import json
import logging
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from practicum.core.strict_json import JsonError, StrictDecoder, parse_json
from practicum.errors import DataError, suggest_install
from practicum.rows.strict import Rejected, parse_line, require_object
from practicum.text.safe import excerpt

log = logging.getLogger(__name__)

HOPELESS_ROW = 1 << 26
"""Bytes that no row has: a longer line shows that the file is something else than JSON Lines."""
HOPELESS_LIST = 1 << 31
"""Bytes that a JSON list may have, since it is read at once; JSON Lines have no such bound."""
CHUNK = 1 << 16
ROWS_AT_ONCE = 1000
WRAPPERS = ("data", "rows", "examples", "instances")
"""The keys under which an object of a JSON file holds the list of its rows."""
EXCERPT = 120
ARCHIVES = {
    b"\x1f\x8b": "a gzip",
    b"PK\x03\x04": "a zip",
    b"BZh": "a bzip2",
    b"\xfd7zXZ": "an xz",
    b"\x28\xb5\x2f\xfd": "a zstd",
}
TABLES = {
    b"PAR1": "is a parquet file; end its name in .parquet",
    b"ARROW1": "is an arrow file; give the folder that it lies in to task.type: datasets",
}
MARK = b"\xef\xbb\xbf"
"""The byte order mark, which editors of Windows put at the start of a file."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a source: its number, from 1, and its columns, or the reason why it has none.

    `line` holds the row's bytes if the row was a separate line.
    """

    number: int
    columns: Mapping[str, Any] | Rejected
    line: bytes | None = None

    def cut(self) -> str:
        """Return the row's first characters; empty if it has neither a line nor columns."""
        if self.line is not None:
            return self.line[:EXCERPT].decode("utf-8", errors="replace")
        if isinstance(self.columns, Rejected):
            return ""
        # Columns of tables may hold dates or bytes, which JSON does not know.
        return json.dumps(self.columns, ensure_ascii=False, default=str)[:EXCERPT]


def number_rows(rows: Iterable[Any]) -> Iterator[Row]:
    """Number mappings from 1, as the rows of any source that is not a file."""
    for number, columns in enumerate(rows, start=1):
        if isinstance(columns, Mapping) and all(isinstance(name, str) for name in columns):
            yield Row(number, columns)
        else:
            reason = f"is of type {type(columns).__name__}, not an object with named columns"
            yield Row(number, Rejected(reason))


def read_rows(path: Path, largest: int) -> Iterator[Row]:
    """Yield the rows of a file; DataError if it cannot be read or its kind is unknown.

    The suffix chooses the kind; a file of any other suffix is JSON Lines. No line or cell of more
    than `largest` bytes is taken.
    """
    with _explain_failure(path):
        _check_regular(path)
        suffix = path.suffix.lower()
        _refuse_archive(path, suffix)
        yield from READERS.get(suffix, read_json_lines)(path, largest)


def count_rows(path: Path) -> int:
    """Return the number of rows of a file; DataError if it cannot be read."""
    return sum(1 for _ in read_rows(path, HOPELESS_ROW))


@contextmanager
def _explain_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror or error}); check the path, which starts at "
            "the recipe's folder"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte {error.start}); save it as UTF-8") from error


def _check_regular(path: Path) -> None:
    kind = path.stat().st_mode
    if stat.S_ISDIR(kind):
        raise DataError(
            f"{path} is a folder; give a file, or write task.type: datasets for a folder of "
            "Hugging Face datasets"
        )
    # A named pipe would block the run for ever, and a device would never end.
    if not stat.S_ISREG(kind):
        raise DataError(f"{path} is not a regular file; give a file of rows")


def _refuse_archive(path: Path, suffix: str) -> None:
    with path.open("rb") as file:
        start = file.read(8)
    for magic, what in ARCHIVES.items():
        if start.startswith(magic):
            raise DataError(f"{path} is {what} file, which is not read; unpack it first")
    for magic, advice in TABLES.items():
        if start.startswith(magic) and suffix != ".parquet":
            raise DataError(f"{path} {advice}")


def read_json_lines(path: Path, largest: int) -> Iterator[Row]:
    """Yield one row per line, without blank lines; a row has the number of its line."""
    with path.open("rb") as file:
        for number, line in enumerate(_read_bounded(path, file, largest), start=1):
            text = (line.removeprefix(MARK) if number == 1 else line).rstrip(b"\r\n")
            if text.strip():
                yield Row(number, parse_line(text, largest), text)


def _read_bounded(path: Path, file: BinaryIO, largest: int) -> Iterator[bytes]:
    """Yield lines, each cut one byte past the largest row, so that none can fill the memory."""
    while line := file.readline(largest + 1):
        length = len(line)
        chunk = line
        while not chunk.endswith(b"\n") and (chunk := file.readline(CHUNK)):
            length += len(chunk)
            if length > HOPELESS_ROW:
                raise DataError(
                    f"{path} has a row of over {HOPELESS_ROW >> 20} MiB; give JSON Lines, one "
                    "object a line"
                )
        yield line


def _read_json(path: Path, largest: int) -> Iterator[Row]:
    """Yield the objects of a JSON list, which an object may contain, or else of JSON Lines."""
    with path.open("rb") as file:
        start = file.read(CHUNK).decode("utf-8-sig", errors="ignore")
    keys, place = _find_list(start)
    return read_json_lines(path, largest) if place is None else _read_list(path, keys, place)


def _find_list(start: str) -> tuple[list[str], int | None]:
    """Return where the list of a JSON file begins, and the keys up to its own if an object holds it.

    The place is None if the file begins with no list and with no object with a key of `WRAPPERS`.
    """
    keys: list[str] = []
    position = _skip_space(start, 0)
    if start.startswith("[", position):
        return keys, position
    decoder = json.JSONDecoder()
    try:
        while start[position] in "{,":
            key, position = decoder.raw_decode(start, _skip_space(start, position + 1))
            keys.append(str(key))
            position = _skip_space(start, _skip_space(start, position) + 1)
            if key in WRAPPERS and start[position] == "[":
                return keys, position
            _, position = decoder.raw_decode(start, position)
            position = _skip_space(start, position)
    except (ValueError, IndexError, RecursionError):
        # The object is not JSON, or larger than its beginning that was read: it is no wrapper.
        pass
    return keys, None


def _read_list(path: Path, keys: list[str], place: int) -> Iterator[Row]:
    """Yield the objects of the list that begins at a character, under the last of these keys if any."""
    if path.stat().st_size > HOPELESS_LIST:
        raise DataError(
            f"{path}: a JSON list of over {HOPELESS_LIST >> 30} GiB, which is read at once; "
            "write one JSON object a line instead"
        )
    text = path.read_text(encoding="utf-8-sig")
    decoder = StrictDecoder()
    position, number = _skip_space(text, place + 1), 0
    more = not text.startswith("]", position)
    while more:
        number += 1
        try:
            parsed, position = decoder.decode_at(text, position)
        except JsonError as error:
            raise DataError(f"{path}: row {number} is not JSON ({error}); fix the file") from error
        yield Row(number, require_object(parsed))
        position = _skip_space(text, position)
        more = text.startswith(",", position)
        if more:
            position = _skip_space(text, position + 1)
        elif not text.startswith("]", position):
            raise DataError(f"{path}: no comma or bracket follows row {number}; fix the file")
    try:
        # Text after the list may only close the object that holds the list.
        later = [*parse_json(('{"":0' if keys else "[]") + text[position + 1 :])][1:]
    except JsonError:
        raise DataError(
            f"{path}: more text follows the list; write one list, or one object per line"
        ) from None
    if keys:
        *before, key = keys
        unused = ", ".join(repr(excerpt(name)) for name in [*before, *later])
        log.info(f"{path}: its rows are the list under {key!r}{unused and f'; not used: {unused}'}")


def _skip_space(text: str, position: int) -> int:
    while text[position : position + 1].isspace():
        position += 1
    return position


def _read_csv(path: Path, largest: int) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        header = file.readline(largest)
        file.seek(0)
        # Where the comma marks decimals, spreadsheets write semicolons between cells.
        semicolons = ";" in header and "," not in header
        yield from _read_cells(path, file, ";" if semicolons else ",", largest)


def _read_tsv(path: Path, largest: int) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        yield from _read_cells(path, file, "\t", largest)


def _read_cells(path: Path, file: Iterable[str], separator: str, largest: int) -> Iterator[Row]:
    """Yield the rows below the header; an empty cell is as if its column were not there."""
    longest_before = csv.field_size_limit(largest)
    try:
        reader = csv.reader(file, delimiter=separator, strict=True)
        # Spreadsheets end a table with rows of empty cells.
        lines = (cells for cells in reader if any(cells))
        names = next(lines, [])
        _refuse_repeated(path, names)
        for number, cells in enumerate(lines, start=1):
            yield Row(number, _name_cells(names, cells))
    except csv.Error as error:
        # After a quotation mark without its partner, the rest of the file would be one cell.
        raise DataError(
            f"{path} is not CSV ({error}); close every quotation mark, or raise task.max_row_bytes "
            f"for cells of more than {largest} characters"
        ) from error
    finally:
        csv.field_size_limit(longest_before)


def _name_cells(names: Sequence[str], cells: Sequence[str]) -> dict[str, str] | Rejected:
    if len(cells) != len(names):
        return Rejected(f"has {len(cells)} cells, and the header has {len(names)}")
    return {name: cell for name, cell in zip(names, cells, strict=True) if name and cell}


def _refuse_repeated(path: Path, names: Sequence[str]) -> None:
    repeated = sorted({name for name in names if name and names.count(name) > 1})
    if repeated:
        raise DataError(
            f"{path}: the column {excerpt(repeated[0], most=EXCERPT)!r} stands twice; rename one"
        )


def _read_parquet(path: Path, largest: int) -> Iterator[Row]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(
            f"{path}: Parquet needs the package pyarrow; {suggest_install('datasets')}"
        ) from error
    try:
        with parquet.ParquetFile(path) as table:
            _refuse_repeated(path, table.schema_arrow.names)
            batches = table.iter_batches(batch_size=ROWS_AT_ONCE)
            yield from number_rows(columns for batch in batches for columns in batch.to_pylist())
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        # The last two are dates that Python's own cannot hold.
        raise DataError(
            f"{path} is not Parquet that can be read ({excerpt(str(error))})"
        ) from error


READERS: dict[str, Callable[[Path, int], Iterator[Row]]] = {
    ".csv": _read_csv,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".tsv": _read_tsv,
}
"""The reader of each suffix; files of any other are JSON Lines."""
