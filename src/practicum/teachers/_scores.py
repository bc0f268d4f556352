"""What a model said about completions, in a folder: one file a call, all of the call or none of it.

A file is safetensors, written by hand because its size must be known beforehand and its data are long. It holds an index
(`keys`, `digests`, `lengths`, one row an answer) and the answers end to end, one tensor a field. Its name is the SHA-256 sum of
its header, the header has that of the index, and the index a digest of each answer, so damage anywhere is found when
it is read. Nothing is ever changed or taken away: an answer has one value for as long as the folder exists.
"""

import fcntl
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from practicum.core.faults import fault
from practicum.errors import ResourceError, TeacherError

Entry = dict[str, Tensor]
"""One answer by field, in its stored form, on the CPU; the first axis of each tensor is the tokens."""

Raw = bytes | memoryview

KEY_BYTES, DIGEST_BYTES, LENGTH_BYTES = 32, 16, 8
INDEX_ROW = KEY_BYTES + DIGEST_BYTES + LENGTH_BYTES
LARGEST_HEADER = 1 << 16
FULL, LOCK, TEMPORARY = "full", "lock", "writing.tmp"

_FILE = re.compile(r"([0-9a-f]{64})\.safetensors")
_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.int8: "I8",
}


@dataclass(frozen=True, slots=True)
class _StoredAnswer:
    """Where one answer is: its file and the fields there, its first token, how many tokens it has, and its digest."""

    path: Path
    fields: Sequence[str]
    first: int
    length: int
    digest: bytes


class _Damage(Exception):
    """Why a file is not what its name says."""


class ScoreStore:
    """The answers in one folder, found by their keys of 32 bytes; processes may share it.

    Errors: TeacherError where a file with one of our names is damaged, ResourceError where nothing can be written. Files with
    other names are not looked at.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.size = 0
        self.tokens = 0
        self._max_bytes = max_bytes
        self._places: dict[bytes, _StoredAnswer] = {}
        self._known: set[str] = set()

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    @property
    def full(self) -> bool:
        """Whether a call did not fit, so that nothing more is kept."""
        return (self.folder / FULL).exists()

    def refresh(self) -> None:
        """Learn of the files that were written since, by whomever."""
        try:
            with os.scandir(self.folder) as entries:
                found = {entry.name for entry in entries if _FILE.fullmatch(entry.name)}
        except FileNotFoundError:
            return
        except OSError as error:
            raise ResourceError(
                f"{self.folder} cannot be read: {error.strerror}; write another folder"
            ) from error
        for name in sorted(found - self._known):
            self._learn(self.folder / name)

    def read(self, key: bytes) -> Entry:
        """The answer of a key that is here."""
        place = self._places[key]
        try:
            # Opened by Python too, whose error says why a file cannot be.
            with place.path.open("rb"), safe_open(place.path, framework="pt") as file:
                rows = slice(place.first, place.first + place.length)
                entry = {name: file.get_slice(name)[rows] for name in place.fields}
        except OSError as error:
            raise _damaged(place.path, f"cannot be read: {error.strerror}") from error
        except SafetensorError as error:
            raise _damaged(place.path, "an answer does not match its digest") from error
        if _digest(key, map(_bytes, entry.values())) != place.digest:
            raise _damaged(place.path, "an answer does not match its digest")
        return entry

    def keep(self, entries: Mapping[bytes, Entry]) -> set[bytes]:
        """Keep the answers, all or none of them; gives back the keys that others kept before, whose values count.

        The first call that does not fit marks the folder as full, and then nothing is kept again, however small: what is
        here does not depend on which calls came twice.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._lock():
                (self.folder / TEMPORARY).unlink(
                    missing_ok=True
                )  # whoever wrote it is dead, for the lock is ours
                self.refresh()
                taken = {key for key in entries if key in self}
                new = {key: entry for key, entry in entries.items() if key not in taken}
                if new and not self.full:
                    self._write(new)
                return taken
        except ResourceError:
            raise
        except OSError as error:
            raise ResourceError(
                f"{self.folder}: a teacher's answers cannot be kept ({error.strerror or error}); free space or make it "
                "writable and resume"
            ) from error

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Be the only process that writes here; the kernel lets go of the lock of a process that died."""
        descriptor = os.open(
            self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666
        )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _write(self, entries: Mapping[bytes, Entry]) -> None:
        """Write one file of answers by way of a synced temporary, or mark the folder as full."""
        raw = {
            key: {name: _bytes(tensor) for name, tensor in entry.items()}
            for key, entry in entries.items()
        }
        index = b"".join(
            [
                b"".join(raw),
                b"".join(_digest(key, fields.values()) for key, fields in raw.items()),
                b"".join(
                    _length(entry).to_bytes(LENGTH_BYTES, "little") for entry in entries.values()
                ),
            ]
        )
        header = _header(list(entries.values()), index)
        size = (
            len(header)
            + len(index)
            + sum(len(part) for fields in raw.values() for part in fields.values())
        )
        if self.size + size > self._max_bytes:
            self._replace(
                self.folder / FULL,
                [f"more than {self._max_bytes} bytes; nothing more is kept\n".encode()],
            )
            return
        fields = next(iter(raw.values()))
        parts = [header, index, *(raw[key][name] for name in fields for key in raw)]
        path = self.folder / f"{hashlib.sha256(header).hexdigest()}.safetensors"
        self._replace(path, parts)
        self._learn(path)

    def _replace(self, path: Path, parts: Sequence[Raw]) -> None:
        temporary = self.folder / TEMPORARY
        with temporary.open("xb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        fault("scores.before_rename")
        os.replace(temporary, path)
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _learn(self, path: Path) -> None:
        """Read the header and the index of a file; of a key that stands twice, the first stays."""
        try:
            places = _places(path)
            size = path.stat().st_size
        except _Damage as damage:
            raise _damaged(path, str(damage)) from damage
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise _damaged(path, "it holds no answers") from error
        except OSError as error:
            raise _damaged(path, f"cannot be read: {error.strerror}") from error
        self._known.add(path.name)
        self.size += size
        self.tokens += sum(place.length for place in places.values())
        self._places = {**places, **self._places}


def _damaged(path: Path, reason: str) -> TeacherError:
    return TeacherError(
        f"{path} is damaged ({reason}); delete it, and what it holds will be scored again, to the rounding of its batches"
    )


def _places(path: Path) -> dict[bytes, _StoredAnswer]:
    """Where each answer of a file is, after a check of all but the answers."""
    match = _FILE.fullmatch(path.name)
    assert match is not None
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        header = file.read(min(length, LARGEST_HEADER))
        if hashlib.sha256(prefix + header).hexdigest() != match[1]:
            raise _Damage("its header does not match its name")
        described = json.loads(header)
        metadata = described.pop("__metadata__")
        start = len(prefix) + len(header)
        if os.fstat(file.fileno()).st_size != start + max(
            entry["data_offsets"][1] for entry in described.values()
        ):
            raise _Damage("it is not as long as its header says")
        count = described["lengths"]["shape"][0]
        index = file.read(count * INDEX_ROW)
    if hashlib.sha256(index).hexdigest() != metadata["index"]:
        raise _Damage("its index does not match its header")
    fields = metadata["fields"].split(",")
    keys, rest = index[: count * KEY_BYTES], index[count * KEY_BYTES :]
    digests, lengths = rest[: count * DIGEST_BYTES], rest[count * DIGEST_BYTES :]
    places, first = {}, 0
    for number in range(count):
        tokens = int.from_bytes(_row(lengths, number, LENGTH_BYTES), "little")
        digest = _row(digests, number, DIGEST_BYTES)
        places[_row(keys, number, KEY_BYTES)] = _StoredAnswer(path, fields, first, tokens, digest)
        first += tokens
    return places


def _header(entries: list[Entry], index: bytes) -> bytes:
    """The length and the JSON of a safetensors file of these answers, which all have the same fields."""
    count, tokens = len(entries), sum(map(_length, entries))
    described: dict[str, object] = {
        "__metadata__": {"fields": ",".join(entries[0]), "index": hashlib.sha256(index).hexdigest()}
    }
    end = 0
    for name, width, dtype in (
        ("keys", KEY_BYTES, "U8"),
        ("digests", DIGEST_BYTES, "U8"),
        ("lengths", 8, "I64"),
    ):
        shape = [count] if name == "lengths" else [count, width]
        described[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [end, end + count * width],
        }
        end += count * width
    for name, tensor in entries[0].items():
        width = math.prod(tensor.shape[1:]) * tensor.element_size()
        described[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": [tokens, *tensor.shape[1:]],
            "data_offsets": [end, end + tokens * width],
        }
        end += tokens * width
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: Tensor) -> Raw:
    """The tensor's own memory, where it lies."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data if tensor.numel() else b""


def _length(entry: Entry) -> int:
    return len(next(iter(entry.values())))


def _row(table: bytes, number: int, width: int) -> bytes:
    return table[number * width : (number + 1) * width]


def _digest(key: bytes, parts: Iterable[Raw]) -> bytes:
    digest = hashlib.blake2b(key, digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()
