"""Named tensors as safetensors files."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from practicum.errors import CheckpointError

HEADER_BYTES = 512
"""Bytes of a file's header that one tensor may take: its name, type, shape and offsets."""


@runtime_checkable
class TensorElsewhere(Protocol):
    """A tensor in another process, which never changes; it is written there and not read here."""

    @property
    def nbytes(self) -> int:
        """The size of the tensor."""
        ...

    def write_file(self, path: Path, named: "Mapping[str, SavedTensor]") -> None:
        """Let a process that is not this one write tensors into a file, this one among them."""
        ...


SavedTensor = Tensor | TensorElsewhere
"""A tensor of a state that is saved."""


def write_tensors(path: Path, named: Mapping[str, SavedTensor]) -> None:
    """Write tensors into one file. Raises OSError if the disk is full."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            tensor.write_file(path, named)
            return
        tensors[name] = tensor
    try:
        save_file(_separate(tensors), path)
    except SafetensorError as error:
        # safetensors reports a full disk in its message only; callers handle an OSError.
        code = re.search(r"os error ([0-9]+)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error


def write_stems(stems: Mapping[str, Mapping[str, SavedTensor]], folder: Path) -> None:
    """Write the tensors of each stem into its file. Raises OSError if the disk is full."""
    for stem, named in stems.items():
        write_tensors(folder / f"{stem}.safetensors", named)


def copy_to_host(named: Mapping[str, SavedTensor]) -> dict[str, SavedTensor]:
    """Copy tensors to host memory, one after another; references to remote tensors are kept."""
    return {
        name: tensor.detach().to("cpu", copy=True) if isinstance(tensor, Tensor) else tensor
        for name, tensor in named.items()
    }


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of one file, on the CPU. Raises CheckpointError if it cannot be read."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be loaded ({error}); resume again, which takes the newest checkpoint "
            "that verifies"
        ) from error


def name_part(stem: str, rank: int, count: int) -> str:
    """Return the name of one of `count` files that hold the tensors of a stem together."""
    return (
        f"{stem}.safetensors" if count == 1 else f"{stem}-{rank + 1:05}-of-{count:05}.safetensors"
    )


def find_parts(folder: Path, stem: str) -> list[Path]:
    """Return the files that hold the tensors of a stem: one, or one from each rank that saved."""
    single = folder / f"{stem}.safetensors"
    parts = sorted(folder.glob(f"{stem}-?????-of-?????.safetensors"))
    return parts if parts and not single.exists() else [single]


def read_parts(folder: Path, stem: str) -> dict[str, Tensor]:
    """Return the tensors of a stem, from one file or several, on the CPU."""
    parts = map(read_tensors, find_parts(folder, stem))
    return {name: tensor for part in parts for name, tensor in part.items()}


def _separate(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as safetensors needs them: contiguous, and without shared storage."""
    storages: set[int] = set()
    separate = {}
    for name, tensor in named.items():
        contiguous = tensor.detach().contiguous()
        storage = contiguous.untyped_storage().data_ptr()
        # The format refuses shared storage, so tied weights (embedding and head) are written twice.
        separate[name] = contiguous.clone() if storage in storages else contiguous
        storages.add(storage)
    return separate
