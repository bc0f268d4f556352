"""Run calls in order in one thread, so that a caller can stop waiting for a call."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

POLL_SECONDS = 0.1
"""The time between two checks while waiting for a call."""


class OneThread:
    """A daemon thread; a stuck call ends with the process.

    Threads of torch have separate settings and caches, so all calls share one thread.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._pending: Future[Any] | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """True while a call is in progress."""
        return self._pending is not None and not self._pending.done()

    def run(self, call: Callable[[], T], check: Callable[[], None]) -> T:
        """Return the result of a call, or raise its error, or the error of `check`.

        `check` is called regularly while waiting.
        """
        context = copy_context()
        self._pending = future = Future[T]()
        self._calls.put((lambda: context.run(call), future))
        while wait([future], POLL_SECONDS).not_done:
            check()
        return future.result()

    def stop(self) -> None:
        """End the thread, unless it is stuck."""
        self._calls.put(None)
        if not self.is_busy:
            self._thread.join()

    def _work(self) -> None:
        while (job := self._calls.get()) is not None:
            call, future = job
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            # The next call may come much later, and results are large.
            del job, call, future
