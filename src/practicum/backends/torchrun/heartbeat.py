"""Detect stuck ranks: a thread in each rank writes signs of life and watches other ranks.

A stopped process keeps its connections, so a collective waits for it until the collective's own
timeout. The first rank watches all remaining ranks, which in turn watch the first rank. A rank is
not watched before its first sign.

The thread writes signs while the main thread computes, because torch operations release the GIL. A
process with a call that holds the GIL for longer than the limit looks stopped.
"""

import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from torch.distributed.distributed_c10d import Store

from practicum.backends._sharded.silence import describe_process

BEAT_SECONDS = 0.5
"""The longest time between two signs of life of a process."""

BEATS_IN_LIMIT = 8
"""The minimum number of signs that a running process writes within the limit."""

STOP_SECONDS = 1.0
"""The time that the thread has to end."""

ENDED = "ended"
"""The key for the run's exit code, which the first process sets in the store at the end."""


class RankSign(NamedTuple):
    """A sign of life: its number, the process, the name of its machine, and its work."""

    number: int
    pid: int
    host: str
    work: str = ""

    def encode(self) -> str:
        """Return the text that the store holds."""
        return " ".join(map(str, self))

    @classmethod
    def decode(cls, text: bytes) -> "RankSign":
        """Return the sign in a text of `encode`."""
        number, pid, host, work = text.decode().split(" ", 3)
        return cls(int(number), int(pid), host, work)


@dataclass(slots=True)
class Silence:
    """The seconds for which a value has not changed while the observer itself was running.

    `longest_gap` is the maximum that one observation adds: the observer, and perhaps every process,
    may have been stopped in between.
    """

    longest_gap: float
    value: object = None
    seconds: float = 0.0
    _last: float | None = None

    def observe(self, value: object, moment: float) -> float:
        """Return the seconds of silence at a moment, given the value at that moment."""
        elapsed = 0.0 if self._last is None else min(moment - self._last, self.longest_gap)
        self.seconds = self.seconds + elapsed if value == self.value else 0.0
        self.value, self._last = value, moment
        return self.seconds


class Heartbeat:
    """The thread of one rank; a rank counts as stuck after `limit` seconds of silence.

    `store` is a connection that only this thread uses: another thread may block a shared connection
    with a call. Set `work` to the current work of the rank.
    """

    def __init__(self, store: Store, rank: int, count: int, limit: float) -> None:
        self.limit = limit
        self.work = ""
        self.has_ended = False
        """True once the first rank has set `ENDED`."""
        self._store = store
        self._key = _name_key(rank)
        self._seconds = min(BEAT_SECONDS, limit / BEATS_IN_LIMIT)
        gap = 2 * self._seconds
        self._signs: dict[int, RankSign] = {}
        watched = range(1, count) if rank == 0 else range(1)
        self._silences = {number: Silence(gap) for number in watched}
        self._beats = 0
        self._own = Silence(gap)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop giving signs."""
        self._is_over.set()
        # The thread is stuck if the store is stuck.
        self._thread.join(STOP_SECONDS)

    def get_signs(self) -> dict[int, RankSign]:
        """Return the newest sign of each watched rank that gave one."""
        return dict(self._signs)

    @property
    def is_cut_off(self) -> bool:
        """True if the store does not answer."""
        return self._own.seconds >= self.limit

    def find_stuck(self) -> str:
        """Name the rank that gave no sign for `limit` seconds, or the store; empty if none."""
        self._own.observe(self._beats, time.monotonic())
        if self.is_cut_off:
            return self._name_host()
        for rank, silence in list(self._silences.items()):
            if silence.seconds >= self.limit:
                return self._name_rank(rank)
        return ""

    def _name_host(self) -> str:
        """Name the process that holds the store."""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and 0 in self._signs:
            return self._name_rank(0)
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        return f"the launcher's store at {address}"

    def _name_rank(self, rank: int) -> str:
        _, pid, host, work = self._signs[rank]
        return describe_process(f"trainer {rank}", pid, host, work)

    def _work(self) -> None:
        # A lost store looks the same as a stopped store, and does not come online again.
        with suppress(RuntimeError):
            while not self._is_over.is_set():
                self._beat()
                self._is_over.wait(self._seconds)

    def _beat(self) -> None:
        """Write a sign, and read the signs of the watched ranks."""
        sign = RankSign(self._beats + 1, os.getpid(), socket.gethostname(), self.work)
        self._store.set(self._key, sign.encode())
        ranks = [
            rank
            for rank in self._silences
            if rank in self._signs or self._store.check([_name_key(rank)])
        ]
        texts = self._store.multi_get([_name_key(rank) for rank in ranks]) if ranks else []
        moment = time.monotonic()
        for rank, text in zip(ranks, texts, strict=True):
            self._signs[rank] = RankSign.decode(text)
            self._silences[rank].observe(self._signs[rank].number, moment)
        self.has_ended = self._store.check([ENDED])
        self._beats += 1


def _name_key(rank: int) -> str:
    return f"sign-{rank}"
