"""Slices of a long axis, and buffers that are reused from slice to slice."""

from collections.abc import Iterator
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

ROWS_IN_CACHE = 4
"""The number of vocabulary-wide rows that fit in the caches of one CPU core."""


def chunks(total: int, size: int) -> Iterator[slice]:
    """Return consecutive slices of at most `size` that cover `range(total)`."""
    if size <= 0:
        raise ValueError(f"chunk size must be positive, got {size}")
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def sum_products(first: Float[Tensor, "T V"], second: Float[Tensor, "T V"]) -> Float[Tensor, " T"]:
    """Return `(first * second).sum(dim=-1)` without a matrix for the products."""
    # On a CPU the products of a few rows stay in the caches; on a GPU each launch would cost a
    # wait.
    rows = ROWS_IN_CACHE if first.device.type == "cpu" else max(len(first), 1)
    return torch.cat(
        [(first[part] * second[part]).sum(dim=-1) for part in chunks(len(first), rows)]
        or [first.new_zeros(0)]
    )


class ReverseKLKernel(Protocol):
    """A program that computes reverse KL and its gradient from logits, row by row."""

    def measure(
        self, student: Float[Tensor, "T V"], teacher: Float[Tensor, "T V"]
    ) -> Float[Tensor, "7 T"]:
        """Return seven numbers per row, the student's before the teacher's.

        They are the two highest logits, the two log-normalisers of the logits minus the highest
        logit, the reverse KL in nats, and the two entropies.
        """
        ...

    def differentiate(
        self,
        student: Float[Tensor, "T V"],
        teacher: Float[Tensor, "T V"],
        numbers: Float[Tensor, "7 T"],
        coefficients: Float[Tensor, " T"],
    ) -> None:
        """Write the gradient of `sum(coefficients * reverse KL)` over the student's logits."""
        ...


class BufferPool:
    """Matrices that are allocated once and reused for every chunk.

    The page faults of a fresh matrix of about 50 MB cost several times the arithmetic on it.
    `kernel` is an optional kernel that computes on the matrices.
    """

    def __init__(self, kernel: ReverseKLKernel | None = None) -> None:
        self.kernel = kernel
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, int], like: Tensor) -> Tensor:
        """Return the named buffer with this shape, in float32 (or float64 if `like` is float64).

        Its content is undefined.
        """
        rows, columns = shape
        dtype = torch.promote_types(like.dtype, torch.float32)
        buffer = self._buffers.get(name)
        if (
            buffer is None
            or buffer.numel() < rows * columns
            or buffer.dtype != dtype
            or buffer.device != like.device
        ):
            buffer = self._buffers[name] = torch.empty(
                rows * columns, dtype=dtype, device=like.device
            )
        return buffer[: rows * columns].view(rows, columns)

    def release(self) -> None:
        """Release all buffers."""
        self._buffers.clear()
