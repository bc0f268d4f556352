"""Run all work on the models on one thread: its queue, its batches and their turns.

Jobs with the same key run as one batch. A batch waits briefly, because its requests do not arrive
at the same instant. A job without a key is not batched and runs in the order of arrival.

Jobs with a lane run in steps. Each lane has at most one batch in progress, and the batches take
turns of `TURN_SECONDS`. A lane holds jobs of similar size, so that no job waits for a far larger
job.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

from practicum.server.futures import ResponseBody

MAX_BATCH = 512
MAX_CELLS = 2**23
"""The most entries in the tables of one answer, and of the answers of one batch.

An entry is a candidate of one token. It takes about 27 bytes until its answer is encoded.
"""

LINGER, MAX_LINGER = 0.01, 0.1
"""The seconds without an arrival that end a batch, and the seconds after which it starts anyway."""

TURN_SECONDS = 0.2

Steps = Generator[None, None, Sequence[ResponseBody]]
"""Work that yields where other work may run, and returns its answers."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelJob:
    """One piece of work: `run` takes the items of a batch of jobs and returns one answer each.

    With a `lane`, `run` returns `Steps`. `base` is the name of the model that the work reads, if
    any. `cells` is the size of the answer's tables.
    """

    item: Any
    run: Callable[[Sequence[Any]], Sequence[ResponseBody] | Steps]
    key: Hashable | None = None
    lane: int | None = None
    base: str | None = None
    cells: int = 0
    future: "Future[ResponseBody]" = field(default_factory=Future)


@dataclass(frozen=True, slots=True, eq=False)
class _RunningBatch:
    """A batch in progress; its futures can be cancelled until they have their answers."""

    jobs: Sequence[ModelJob]
    steps: Steps

    @property
    def is_cancelled(self) -> bool:
        """Return True if all of its requests are cancelled."""
        return all(job.future.cancelled() for job in self.jobs)


class Worker:
    """Run jobs on a separate thread, in a copy of the context of its creation.

    `encode_error` turns an exception into an answer. `fits` returns True if a model can be loaded
    in addition to the models in use. If a job's model does not fit, the job and all later jobs wait
    until nothing is in progress.
    """

    def __init__(
        self,
        encode_error: Callable[[Exception], ResponseBody],
        fits: Callable[[str], bool] = lambda base: True,
    ) -> None:
        self._encode_error = encode_error
        self._fits = fits
        self._waiting: deque[ModelJob] = deque()
        self._running: deque[_RunningBatch] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._run,), name="practicum-models", daemon=True
        )
        self._thread.start()

    def submit(self, job: ModelJob) -> "Future[ResponseBody]":
        """Queue a job; cancel its future if the worker has closed."""
        with self._changed:
            if self._closing:
                job.future.cancel()
            else:
                self._waiting.append(job)
                self._changed.notify()
        return job.future

    def close(self, timeout: float) -> bool:
        """Cancel waiting jobs and jobs in steps, finish the current job, and stop the thread.

        Return True if the thread has ended within `timeout` seconds.
        """
        with self._changed:
            self._closing = True
            while self._waiting:
                self._waiting.popleft().future.cancel()
            self._changed.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._closing:
            batch = self._begin(self._take_batch())
            if batch is not None:
                self._continue(batch)
            if self._running:
                self._continue(self._running.popleft())
        while self._running:
            batch = self._running.popleft()
            # Closing a generator runs its cleanup, which frees the caches of a batch in progress.
            batch.steps.close()
            for job in batch.jobs:
                job.future.cancel()

    def _begin(self, batch: Sequence[ModelJob]) -> _RunningBatch | None:
        """Run a batch at once, or return it if it runs in steps."""
        in_steps = bool(batch) and batch[0].lane is not None
        jobs = [job for job in batch if not job.future.cancelled()]
        if not in_steps:
            # From here on its client cannot cancel a job. Work in steps stays cancellable until its
            # end.
            jobs = [job for job in jobs if job.future.set_running_or_notify_cancel()]
        if not jobs:
            return None
        try:
            result = jobs[0].run([job.item for job in jobs])
        except Exception as error:  # any failure of a job is an answer: its client waits for one
            result = [self._encode_error(error)] * len(jobs)
        if isinstance(result, Generator):
            return _RunningBatch(jobs, result)
        _resolve(jobs, result)
        return None

    def _continue(self, batch: _RunningBatch) -> None:
        """Give a batch its turn, unless all of its requests are cancelled."""
        until = time.monotonic() + TURN_SECONDS
        try:
            while not batch.is_cancelled and not self._closing:
                next(batch.steps)
                if time.monotonic() >= until:
                    self._running.append(batch)
                    return
        except StopIteration as end:
            _resolve(batch.jobs, end.value)
            return
        except Exception as error:  # any failure of a job is an answer: its client waits for one
            _resolve(batch.jobs, [self._encode_error(error)] * len(batch.jobs))
            return
        if batch.is_cancelled:
            batch.steps.close()
        else:
            self._running.append(batch)

    def _take_batch(self) -> list[ModelJob]:
        """Return the first job that may start with all jobs of its batch.

        The list is empty if no job may start or the worker closes.
        """
        with self._changed:
            while not self._waiting and not self._running and not self._closing:
                self._changed.wait()
            first = self._find_first()
            if first is None or self._closing:
                return []
            if first.key is not None and not self._running:
                self._wait_for_batch(first)
            if self._closing:
                return []
            batch = [first]
            if first.key is not None:
                batch = _limit([job for job in self._waiting if _is_same_batch(job, first)])
            chosen = set(map(id, batch))
            self._waiting = deque(job for job in self._waiting if id(job) not in chosen)
            return batch

    def _find_first(self) -> ModelJob | None:
        """Return the job with the longest wait among the jobs with a free lane."""
        busy_lanes = {batch.jobs[0].lane for batch in self._running}
        for job in self._waiting:
            # A model that a batch in progress reads cannot be evicted. Later jobs wait too, because
            # otherwise a stream of small jobs could keep this model from ever fitting.
            if self._running and job.base is not None and not self._fits(job.base):
                return None
            if job.lane is None or job.lane not in busy_lanes:
                return job
        return None

    def _wait_for_batch(self, first: ModelJob) -> None:
        start = time.monotonic()
        count = -1
        while (
            len(self._waiting) != count
            and time.monotonic() - start < MAX_LINGER
            and not self._closing
        ):
            count = len(self._waiting)
            if sum(_is_same_batch(job, first) for job in self._waiting) >= MAX_BATCH:
                return
            self._changed.wait(LINGER)


def _is_same_batch(job: ModelJob, first: ModelJob) -> bool:
    return job.key == first.key and job.lane == first.lane


def _limit(jobs: Sequence[ModelJob]) -> list[ModelJob]:
    """Return the first jobs, at least one, within the limits of a batch."""
    cells = itertools.accumulate(job.cells for job in jobs)
    fitting = itertools.takewhile(lambda total: total <= MAX_CELLS, cells)
    return list(jobs[: min(max(sum(1 for _ in fitting), 1), MAX_BATCH)])


def _resolve(jobs: Sequence[ModelJob], answers: Sequence[ResponseBody]) -> None:
    """Give each job its answer, unless it has been cancelled meanwhile."""
    for job, answer in zip(jobs, answers, strict=True):
        # A job in steps is marked as running only now, for it could be cancelled until here.
        if job.future.running() or job.future.set_running_or_notify_cancel():
            job.future.set_result(answer)
