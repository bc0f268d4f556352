"""Cutting a long axis into pieces that fit in memory."""

from collections.abc import Iterator


def chunks(total: int, size: int) -> Iterator[slice]:
    """Consecutive slices of at most `size` that cover `range(total)`."""
    if size <= 0:
        raise ValueError(f"chunk size must be positive, got {size}")
    return (slice(start, min(start + size, total)) for start in range(0, total, size))
