"""The one thread that touches the models, and how waiting work is put together.

Work of the same key is done in one go. A batch waits for a moment, because what belongs together does not arrive at the same
instant; work without a key is done alone and in the order in which it came.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from practicum.server.futures import Answer

MOST_TOGETHER = 512
LINGER, LONGEST_LINGER = 0.01, 0.1
"""Seconds without an arrival that end a batch, and seconds after which it begins anyway."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One piece of work: `run` takes the items of all jobs of its batch and gives one answer each."""

    item: Any
    run: Callable[[Sequence[Any]], Sequence[Answer]]
    key: Hashable | None = None
    future: "Future[Answer]" = field(default_factory=Future)


class Worker:
    """Runs jobs on a thread of its own; `failed` turns what was raised into an answer."""

    def __init__(self, failed: Callable[[Exception], Answer]) -> None:
        self._failed = failed
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="practicum-models", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> "Future[Answer]":
        """Queue a job; its future is cancelled where the worker has closed."""
        with self._changed:
            if self._closing:
                job.future.cancel()
            else:
                self._waiting.append(job)
                self._changed.notify()
        return job.future

    def close(self, timeout: float) -> bool:
        """Finish what is being done, cancel what waits, and say whether the thread has ended in time."""
        with self._changed:
            self._closing = True
            while self._waiting:
                self._waiting.popleft().future.cancel()
            self._changed.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while batch := self._next():
            taken = [job for job in batch if job.future.set_running_or_notify_cancel()]
            if not taken:
                continue
            try:
                answers = taken[0].run([job.item for job in taken])
            except Exception as error:  # whatever happened, its client is waiting to be told
                answers = [self._failed(error)] * len(taken)
            for job, answer in zip(taken, answers, strict=True):
                job.future.set_result(answer)

    def _next(self) -> list[Job]:
        """The first job that waits, with all of its kind; nothing where the worker closes."""
        with self._changed:
            while not self._waiting and not self._closing:
                self._changed.wait()
            if self._closing:
                return []
            first = self._waiting[0]
            if first.key is not None:
                self._linger(first)
            if self._closing:
                return []
            batch = [first] if first.key is None else [job for job in self._waiting if job.key == first.key]
            batch = batch[:MOST_TOGETHER]
            chosen = set(map(id, batch))
            self._waiting = deque(job for job in self._waiting if id(job) not in chosen)
            return batch

    def _linger(self, first: Job) -> None:
        start = time.monotonic()
        count = -1
        while len(self._waiting) != count and time.monotonic() - start < LONGEST_LINGER and not self._closing:
            count = len(self._waiting)
            if sum(job.key == first.key for job in self._waiting) >= MOST_TOGETHER:
                return
            self._changed.wait(LINGER)
