"""Named tensors as safetensors files."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from practicum.errors import CheckpointError

HEADER_BYTES = 512
"""Bytes of a file's header that one tensor may take: its name, type, shape and place."""


def write_tensors(path: Path, named: Mapping[str, Tensor]) -> None:
    """Write one file; a full disk is an OSError here as everywhere else."""
    try:
        save_file(_separate(named), path)
    except SafetensorError as error:
        code = re.search(r"os error ([0-9]+)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of one file, on the CPU; CheckpointError where it cannot be read."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be loaded ({error}); resume again, which takes the newest checkpoint that verifies"
        ) from error


def _separate(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as the format wants them: contiguous, and tied ones (embedding and head) written twice."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in named.items():
        data = tensor.detach().contiguous()
        storage = data.untyped_storage().data_ptr()
        separate[name] = data.clone() if storage in seen else data
        seen.add(storage)
    return separate
