"""The one thread that touches the models, how waiting work is put together, and how much of it shares the thread's time.

Work of the same key is done in one go. A batch waits for a moment, because what belongs together does not arrive at the same
instant; work without a key is done alone and in the order in which it came.

Work with a lane is done in steps. Each lane has at most one batch in progress, and the batches take turns of
`TURN_SECONDS`; a lane holds work of about one size, so that nothing waits for what is far larger than itself.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

from practicum.server.futures import Answer

MOST_TOGETHER = 512
LINGER, LONGEST_LINGER = 0.01, 0.1
"""Seconds without an arrival that end a batch, and seconds after which it begins anyway."""

TURN_SECONDS = 0.2

Steps = Generator[None, None, Sequence[Answer]]
"""Work that pauses where other work can be done in between, and returns its answers."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelJob:
    """One piece of work: `run` takes the items of all jobs of its batch and gives one answer each.

    With a `lane` it gives them in steps. `base` is the model that the work reads, where it reads one.
    """

    item: Any
    run: Callable[[Sequence[Any]], Sequence[Answer] | Steps]
    key: Hashable | None = None
    lane: int | None = None
    base: str | None = None
    future: "Future[Answer]" = field(default_factory=Future)


@dataclass(frozen=True, slots=True, eq=False)
class _Begun:
    """A batch in progress. Its futures can be cancelled until they have their answers."""

    jobs: Sequence[ModelJob]
    steps: Steps

    @property
    def unwanted(self) -> bool:
        """Whether nobody waits for any of it."""
        return all(job.future.cancelled() for job in self.jobs)


class Worker:
    """Runs jobs on a thread of its own, in a copy of the context in which it was made.

    `failed` turns what was raised into an answer. `fits` says whether a model can be read beside those that are being read;
    a job whose model does not fit waits until nothing is in progress, and so does all that came after it.
    """

    def __init__(
        self, failed: Callable[[Exception], Answer], fits: Callable[[str], bool] = lambda base: True
    ) -> None:
        self._failed = failed
        self._fits = fits
        self._waiting: deque[ModelJob] = deque()
        self._begun: deque[_Begun] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._work,), name="practicum-models", daemon=True
        )
        self._thread.start()

    def submit(self, job: ModelJob) -> "Future[Answer]":
        """Queue a job; its future is cancelled where the worker has closed."""
        with self._changed:
            if self._closing:
                job.future.cancel()
            else:
                self._waiting.append(job)
                self._changed.notify()
        return job.future

    def close(self, timeout: float) -> bool:
        """Cancel what waits and what is done in steps, finish what is not, and say whether the thread has ended in time."""
        with self._changed:
            self._closing = True
            while self._waiting:
                self._waiting.popleft().future.cancel()
            self._changed.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while not self._closing:
            begun = self._begin(self._next())
            if begun is not None:
                self._go_on(begun)
            if self._begun:
                self._go_on(self._begun.popleft())
        while self._begun:
            begun = self._begun.popleft()
            begun.steps.close()
            for job in begun.jobs:
                job.future.cancel()

    def _begin(self, batch: Sequence[ModelJob]) -> _Begun | None:
        """Do what is done at once; return what is done in steps."""
        in_steps = bool(batch) and batch[0].lane is not None
        taken = [job for job in batch if not job.future.cancelled()]
        if not in_steps:
            taken = [job for job in taken if job.future.set_running_or_notify_cancel()]
        if not taken:
            return None
        try:
            result = taken[0].run([job.item for job in taken])
        except Exception as error:  # whatever happened, its client is waiting to be told
            result = [self._failed(error)] * len(taken)
        if isinstance(result, Generator):
            return _Begun(taken, result)
        _answer(taken, result)
        return None

    def _go_on(self, begun: _Begun) -> None:
        """Give a batch its turn, unless nobody waits for it any more."""
        until = time.monotonic() + TURN_SECONDS
        try:
            while not begun.unwanted and not self._closing:
                next(begun.steps)
                if time.monotonic() >= until:
                    self._begun.append(begun)
                    return
        except StopIteration as end:
            _answer(begun.jobs, end.value)
            return
        except Exception as error:  # as above
            _answer(begun.jobs, [self._failed(error)] * len(begun.jobs))
            return
        if begun.unwanted:
            begun.steps.close()
        else:
            self._begun.append(begun)

    def _next(self) -> list[ModelJob]:
        """Return the first job that may begin, with all of its kind: nothing where none may, or the worker closes."""
        with self._changed:
            while not self._waiting and not self._begun and not self._closing:
                self._changed.wait()
            first = self._first()
            if first is None or self._closing:
                return []
            if first.key is not None and not self._begun:
                self._wait_for_batch(first)
            if self._closing:
                return []
            batch = (
                [first]
                if first.key is None
                else [job for job in self._waiting if _alike(job, first)]
            )
            batch = batch[:MOST_TOGETHER]
            chosen = set(map(id, batch))
            self._waiting = deque(job for job in self._waiting if id(job) not in chosen)
            return batch

    def _first(self) -> ModelJob | None:
        """Return the job that has waited longest of those whose lane is free."""
        taken = {begun.jobs[0].lane for begun in self._begun}
        for job in self._waiting:
            if self._begun and job.base is not None and not self._fits(job.base):
                return None
            if job.lane is None or job.lane not in taken:
                return job
        return None

    def _wait_for_batch(self, first: ModelJob) -> None:
        start = time.monotonic()
        count = -1
        while (
            len(self._waiting) != count
            and time.monotonic() - start < LONGEST_LINGER
            and not self._closing
        ):
            count = len(self._waiting)
            if sum(_alike(job, first) for job in self._waiting) >= MOST_TOGETHER:
                return
            self._changed.wait(LINGER)


def _alike(job: ModelJob, other: ModelJob) -> bool:
    return job.key == other.key and job.lane == other.lane


def _answer(jobs: Sequence[ModelJob], answers: Sequence[Answer]) -> None:
    """Give each job its answer, but for those that were cancelled meanwhile."""
    for job, answer in zip(jobs, answers, strict=True):
        if job.future.running() or job.future.set_running_or_notify_cancel():
            job.future.set_result(answer)
