"""A mapping that keeps its newest entries up to a number of bytes."""

from collections import OrderedDict
from threading import Lock
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class NewestEntries(Generic[K, V]):
    """A mapping that keeps the newest entries of together at most `most_bytes`; reading one makes it newer.

    With rollouts ahead, a thread that samples or scores uses it next to the one that trains.
    """

    def __init__(self, most_bytes: int) -> None:
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._most_bytes, self._nbytes = most_bytes, 0
        self._lock = Lock()

    def get(self, key: K) -> V | None:
        """Return an entry, or None if it is not kept."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: K, entry: V, nbytes: int) -> None:
        """Add or replace an entry of this size."""
        with self._lock:
            _, former = self._entries.pop(key, (None, 0))
            self._entries[key] = entry, nbytes
            self._nbytes += nbytes - former
            while self._nbytes > self._most_bytes:
                _, (_, dropped) = self._entries.popitem(last=False)
                self._nbytes -= dropped
