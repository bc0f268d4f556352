"""Answers that are asked for now and fetched later, and how many may be waited for."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from practicum.server.refusals import HttpRefusal


@dataclass(frozen=True, slots=True)
class Answer:
    """The body of a finished request, protobuf or JSON."""

    body: bytes
    media_type: str


class Futures:
    """Requests by id.

    Finished answers are kept until younger ones need their place, so that a client whose connection broke can fetch one again;
    more than `most_open` unfinished requests are refused with 429. What is kept of a request is its answer alone: its future
    holds two kilobytes of locks, and the callbacks of all who waited for it.

    Requests begin on the event loop and finish on the worker's thread; a lock guards what both change.
    """

    def __init__(
        self, most_open: int = 4096, kept_bytes: int = 2**28, most_kept: int = 2**14
    ) -> None:
        self._open: dict[str, Future[Answer]] = {}
        self._kept: OrderedDict[str, Answer | None] = OrderedDict()
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._held_bytes = 0
        self._lock = threading.Lock()
        self._most_open = most_open
        self._most_bytes = kept_bytes
        self._most_kept = most_kept

    def open(self, request_id: str, begin: Callable[[], "Future[Answer]"]) -> None:
        """Begin a request unless one of that id has begun: what a client sends twice is done once."""
        if request_id in self:
            return
        with self._lock:
            self._tidy()
            if len(self._open) >= self._most_open:
                raise HttpRefusal(
                    429, f"{self._most_open} requests are waiting; ask again later", retry_after=1
                )
        future = begin()
        with self._lock:
            self._open[request_id] = future
        future.add_done_callback(partial(self._finished, request_id))

    def get(self, request_id: str) -> "Future[Answer]":
        """Return the request of that id.

        `Refused` with 410 where its answer is no longer kept, with 404 where there was none.
        """
        with self._lock:
            if request_id in self._open:
                return self._open[request_id]
            if request_id in self._kept:
                return _finished_with(self._kept[request_id])
        if request_id in self._gone:
            raise HttpRefusal(410, f"the answer to {request_id} is no longer kept; ask again")
        raise HttpRefusal(404, f"there is no request {request_id!a:.80}")

    @property
    def unfinished(self) -> int:
        """How many requests have no answer yet."""
        return len(self._open)

    @property
    def kept_bytes(self) -> int:
        """How large the answers are together that can still be fetched."""
        return self._held_bytes

    def __contains__(self, request_id: str) -> bool:
        """Return whether the request waits, or its answer is kept."""
        with self._lock:
            return request_id in self._open or request_id in self._kept

    def _finished(self, request_id: str, future: "Future[Answer]") -> None:
        """Keep an answer, or None for a cancelled request, on the thread that finished it."""
        answer = None if future.cancelled() else future.result()
        with self._lock:
            self._kept[request_id] = answer
            self._held_bytes += _size(answer)
            del self._open[request_id]

    def _tidy(self) -> None:
        """Let go of the oldest answers that are too many or too large together; called with the lock held."""
        while self._kept and (
            self._held_bytes > self._most_bytes or len(self._kept) > self._most_kept
        ):
            request_id, answer = self._kept.popitem(last=False)
            self._held_bytes -= _size(answer)
            self._gone[request_id] = None
            if len(self._gone) > 2 * self._most_kept:
                self._gone.popitem(last=False)


def _finished_with(answer: Answer | None) -> "Future[Answer]":
    """Return a future that has this answer, or that was cancelled where there is none."""
    future: Future[Answer] = Future()
    if answer is None:
        future.cancel()
        future.set_running_or_notify_cancel()
    else:
        future.set_result(answer)
    return future


def _size(answer: Answer | None) -> int:
    return 0 if answer is None else len(answer.body)
