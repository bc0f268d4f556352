"""Stored answers of a teacher in a folder: one file per call, written completely or not at all.

A file is safetensors, written by hand because its size must be known in advance and its data are
long. It holds an index (`keys`, `digests`, `lengths`, one row for each answer) and the answers one
after another, one tensor for each field. The file name is the SHA-256 of the header, the header
holds the SHA-256 of the index, and the index holds a digest of each answer, so reading detects
damage anywhere. Nothing is ever changed or deleted: an answer has one value for as long as the
folder exists.
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

from practicum.core.faults import inject_fault
from practicum.errors import ResourceError, TeacherError

Entry = dict[str, Tensor]
"""One answer by field, as stored, on the CPU; the first axis of each tensor is the tokens."""

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
    """The place of one answer: file and fields, first token, number of tokens, and digest."""

    path: Path
    fields: Sequence[str]
    first: int
    length: int
    digest: bytes


class _Damage(Exception):
    """The reason why a file does not match its name."""


class ScoreStore:
    """The answers in one folder by their keys of 32 bytes; several processes may share it.

    Errors: TeacherError if a file with one of our names is damaged, ResourceError if a write
    fails. Files with other names are ignored.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.size = 0
        self.tokens = 0
        self._max_bytes = max_bytes
        self._answers: dict[bytes, _StoredAnswer] = {}
        self._files: set[str] = set()

    def __contains__(self, key: bytes) -> bool:
        return key in self._answers

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def is_full(self) -> bool:
        """True once a call did not fit: then nothing more is stored."""
        return (self.folder / FULL).exists()

    def refresh(self) -> None:
        """Load the files that this or another process has written since."""
        try:
            with os.scandir(self.folder) as entries:
                names = {entry.name for entry in entries if _FILE.fullmatch(entry.name)}
        except FileNotFoundError:
            return
        except OSError as error:
            raise ResourceError(
                f"{self.folder} cannot be read: {error.strerror}; set another folder"
            ) from error
        for name in sorted(names - self._files):
            self._load(self.folder / name)

    def read(self, key: bytes) -> Entry:
        """Return the answer of a key in the store."""
        answer = self._answers[key]
        try:
            # Python opens the file too, because its error explains why the file cannot be opened.
            with answer.path.open("rb"), safe_open(answer.path, framework="pt") as file:
                rows = slice(answer.first, answer.first + answer.length)
                entry = {name: file.get_slice(name)[rows] for name in answer.fields}
        except OSError as error:
            raise _report_damage(answer.path, f"cannot be read: {error.strerror}") from error
        except SafetensorError as error:
            raise _report_damage(answer.path, "an answer does not match its digest") from error
        if _digest(key, map(_read_bytes, entry.values())) != answer.digest:
            raise _report_damage(answer.path, "an answer does not match its digest")
        return entry

    def keep(self, entries: Mapping[bytes, Entry]) -> set[bytes]:
        """Store the answers, all or none, and return the keys that were stored before.

        The stored value of such a key is used. The first call that does not fit marks the folder as
        full, and then nothing more is stored, even if it would fit: so the contents do not depend
        on which calls were repeated.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._lock():
                # The lock is ours, so the process that left this file is dead.
                (self.folder / TEMPORARY).unlink(missing_ok=True)
                self.refresh()
                stored = {key for key in entries if key in self}
                new = {key: entry for key, entry in entries.items() if key not in stored}
                if new and not self.is_full:
                    self._write(new)
                return stored
        except ResourceError:
            raise
        except OSError as error:
            raise ResourceError(
                f"{self.folder}: a teacher's answers cannot be stored ({error.strerror or error}); "
                "free space or make it writable and resume"
            ) from error

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Be the only process that writes; the kernel releases the lock of a dead process."""
        descriptor = os.open(
            self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666
        )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _write(self, entries: Mapping[bytes, Entry]) -> None:
        """Write one file of answers, or mark the folder as full."""
        raw = {
            key: {name: _read_bytes(tensor) for name, tensor in entry.items()}
            for key, entry in entries.items()
        }
        digests = [_digest(key, fields.values()) for key, fields in raw.items()]
        lengths = [
            _count_tokens(entry).to_bytes(LENGTH_BYTES, "little") for entry in entries.values()
        ]
        index = b"".join([*raw, *digests, *lengths])
        header = _build_header(list(entries.values()), index)
        fields = next(iter(raw.values()))
        parts = [header, index, *(raw[key][name] for name in fields for key in raw)]
        if self.size + sum(map(len, parts)) > self._max_bytes:
            text = f"more than {self._max_bytes} bytes; nothing more is kept\n"
            self._replace(self.folder / FULL, [text.encode()])
            return
        path = self.folder / f"{hashlib.sha256(header).hexdigest()}.safetensors"
        self._replace(path, parts)
        self._load(path)

    def _replace(self, path: Path, parts: Sequence[Raw]) -> None:
        """Write a file that is complete or absent after a crash."""
        temporary = self.folder / TEMPORARY
        with temporary.open("xb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        inject_fault("scores.before_rename")
        os.replace(temporary, path)
        # The new name is on the disk only once the folder is.
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _load(self, path: Path) -> None:
        """Read the header and the index of a file; the first answer of a key counts."""
        try:
            answers = _read_index(path)
            size = path.stat().st_size
        except _Damage as damage:
            raise _report_damage(path, str(damage)) from damage
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise _report_damage(path, "it holds no answers") from error
        except OSError as error:
            raise _report_damage(path, f"cannot be read: {error.strerror}") from error
        self._files.add(path.name)
        self.size += size
        self.tokens += sum(answer.length for answer in answers.values())
        self._answers = {**answers, **self._answers}


def _report_damage(path: Path, reason: str) -> TeacherError:
    return TeacherError(
        f"{path} is damaged ({reason}); delete it, and its answers will be scored again (equal up "
        "to rounding)"
    )


def _read_index(path: Path) -> dict[bytes, _StoredAnswer]:
    """Return the place of each answer of a file after checking everything but the answers."""
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
        end = max(entry["data_offsets"][1] for entry in described.values())
        if os.fstat(file.fileno()).st_size != len(prefix) + len(header) + end:
            raise _Damage("its length differs from its header")
        count = described["lengths"]["shape"][0]
        index = file.read(count * INDEX_ROW)
    if hashlib.sha256(index).hexdigest() != metadata["index"]:
        raise _Damage("its index does not match its header")
    fields = metadata["fields"].split(",")
    keys_end = count * KEY_BYTES
    digests_end = keys_end + count * DIGEST_BYTES
    keys, digests, lengths = index[:keys_end], index[keys_end:digests_end], index[digests_end:]
    answers, first = {}, 0
    for number in range(count):
        tokens = int.from_bytes(_take_row(lengths, number, LENGTH_BYTES), "little")
        digest = _take_row(digests, number, DIGEST_BYTES)
        key = _take_row(keys, number, KEY_BYTES)
        answers[key] = _StoredAnswer(path, fields, first, tokens, digest)
        first += tokens
    return answers


def _build_header(entries: list[Entry], index: bytes) -> bytes:
    """Return the length and the JSON of a safetensors file; all answers have the same fields."""
    count, tokens = len(entries), sum(map(_count_tokens, entries))
    tensors: list[tuple[str, str, list[int], int]] = [
        ("keys", "U8", [count, KEY_BYTES], 1),
        ("digests", "U8", [count, DIGEST_BYTES], 1),
        ("lengths", "I64", [count], LENGTH_BYTES),
    ]
    for name, tensor in entries[0].items():
        shape = [tokens, *tensor.shape[1:]]
        tensors.append((name, _DTYPES[tensor.dtype], shape, tensor.element_size()))
    described: dict[str, object] = {
        "__metadata__": {"fields": ",".join(entries[0]), "index": hashlib.sha256(index).hexdigest()}
    }
    end = 0
    for name, dtype, shape, itemsize in tensors:
        start, end = end, end + math.prod(shape) * itemsize
        described[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    # Padded to 8 bytes, so that the tensors after it are aligned in a memory map.
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read_bytes(tensor: Tensor) -> Raw:
    """Return the tensor's own memory without a copy."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data if tensor.numel() else b""


def _count_tokens(entry: Entry) -> int:
    return len(next(iter(entry.values())))


def _take_row(table: bytes, number: int, width: int) -> bytes:
    return table[number * width : (number + 1) * width]


def _digest(key: bytes, parts: Iterable[Raw]) -> bytes:
    digest = hashlib.blake2b(key, digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()
