"""Cutting a long axis into pieces that fit in memory."""

from collections.abc import Iterator

import torch
from torch import Tensor


def chunks(total: int, size: int) -> Iterator[slice]:
    """Consecutive slices of at most `size` that cover `range(total)`."""
    if size <= 0:
        raise ValueError(f"chunk size must be positive, got {size}")
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


class BufferPool:
    """Matrices that are made once and written again for every chunk.

    A fresh matrix of some 50 MB costs the operating system's page faults, several times the arithmetic done on it.
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, int], like: Tensor) -> Tensor:
        """The tile of that name, cut to `shape`, with whatever stands in it; float32 (or float64 as `like`)."""
        rows, columns = shape
        dtype = torch.promote_types(like.dtype, torch.float32)
        held = self._held.get(name)
        if (
            held is None
            or held.numel() < rows * columns
            or held.dtype != dtype
            or held.device != like.device
        ):
            held = self._held[name] = torch.empty(rows * columns, dtype=dtype, device=like.device)
        return held[: rows * columns].view(rows, columns)

    def release(self) -> None:
        """Let go of all tiles."""
        self._held.clear()
