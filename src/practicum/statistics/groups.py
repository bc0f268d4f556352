"""Grouping of values by key, and means of values that may be missing."""

from collections.abc import Hashable, Iterable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def group_pairs(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the values of each key; keys and values keep their order."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def mean_of(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if all are."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None
