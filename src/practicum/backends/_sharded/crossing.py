"""Send objects between processes; their tensors are moved to the CPU on the way.

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
    """Pickle tensors of any device as CPU tensors."""

    def reducer_override(self, obj: Any) -> Any:
        """Return the reduction of a tensor on another device; other objects use the default one."""
        if not isinstance(obj, Tensor) or obj.device.type == "cpu":
            return NotImplemented
        return _restore, (obj.detach().cpu(), obj.device.type)


def _restore(tensor: Tensor, device: str) -> Tensor:
    # A device without an index is the current device of the reading process.
    return tensor.to(torch.device(device))


def pack(part: Any) -> bytes:
    """Return an object as bytes that any process can read."""
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
