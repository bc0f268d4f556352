"""Objects that cross processes: their tensors travel on the CPU.

A pickled GPU tensor is restored on the sender's GPU, but each process of a machine has a different
GPU. Here it is restored on the receiver's current device.
"""

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Pickler(pickle.Pickler):
    """Pickles tensors of any device as tensors of the CPU."""

    def reducer_override(self, obj: Any) -> Any:
        """Return how a tensor of another device is restored; other objects have their own way."""
        if not isinstance(obj, Tensor) or obj.device.type == "cpu":
            return NotImplemented
        return _restore, (obj.detach().cpu(), obj.device.type)


def _restore(tensor: Tensor, device: str) -> Tensor:
    # Without an index it is the current device of the process that reads.
    return tensor.to(torch.device(device))


def pack(part: Any) -> bytes:
    """Return an object as bytes that any process reads."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(part)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """Return the object of `pack`, with its tensors on this process's own devices."""
    return pickle.loads(data)


def gather_all(part: Any) -> list[Any]:
    """Return the parts of all ranks in every rank; all ranks call this."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, pack(part))
    return [unpack(data) for data in parts]
