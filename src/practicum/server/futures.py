"""Answers that are asked for now and fetched later, and how many may be waited for."""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from practicum.server.refusals import Refused


@dataclass(frozen=True, slots=True)
class Answer:
    """The body of a finished request, protobuf or JSON."""

    body: bytes
    media_type: str


class Futures:
    """Requests by id.

    Finished answers are kept until younger ones need their place, so that a client whose connection broke can fetch one again;
    more than `most_open` unfinished requests are refused with 429.

    Requests begin on the event loop and finish on the worker's thread; a lock guards what both change.
    """

    def __init__(self, most_open: int = 4096, kept_bytes: int = 2**28, most_kept: int = 2**14) -> None:
        self._entries: dict[str, Future[Answer]] = {}
        self._open: set[str] = set()
        self._done: deque[tuple[str, int]] = deque()
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._held_bytes = 0
        self._lock = threading.Lock()
        self._most_open = most_open
        self._most_bytes = kept_bytes
        self._most_kept = most_kept

    def open(self, request_id: str, begin: Callable[[], "Future[Answer]"]) -> None:
        """Begin a request unless one of that id has begun: what a client sends twice is done once."""
        if request_id in self._entries:
            return
        with self._lock:
            self._tidy()
            if len(self._open) >= self._most_open:
                raise Refused(429, f"{self._most_open} requests are waiting; ask again later", retry_after=1)
            self._open.add(request_id)
        self._entries[request_id] = future = begin()
        future.add_done_callback(partial(self._finished, request_id))

    def get(self, request_id: str) -> "Future[Answer]":
        """The request of that id; `Refused` with 410 where its answer is no longer kept, with 404 where there was none."""
        if request_id in self._entries:
            return self._entries[request_id]
        if request_id in self._gone:
            raise Refused(410, f"the answer to {request_id} is no longer kept; ask again")
        raise Refused(404, f"there is no request {request_id!a:.80}")

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
        return request_id in self._entries

    def _finished(self, request_id: str, future: "Future[Answer]") -> None:
        """Keep an answer and its size, on the thread that finished it.

        It is kept in a future of its own: the first one holds on to the callbacks of all who waited for it.
        """
        kept: Future[Answer] = Future()
        if future.cancelled():
            kept.cancel()
            kept.set_running_or_notify_cancel()
        else:
            kept.set_result(future.result())
        size = 0 if future.cancelled() else len(future.result().body)
        with self._lock:
            self._entries[request_id] = kept
            self._done.append((request_id, size))
            self._held_bytes += size
            self._open.discard(request_id)

    def _tidy(self) -> None:
        """Let go of the oldest answers that are too many or too large together; called with the lock held."""
        while self._done and (self._held_bytes > self._most_bytes or len(self._done) > self._most_kept):
            request_id, size = self._done.popleft()
            self._held_bytes -= size
            del self._entries[request_id]
            self._gone[request_id] = None
            if len(self._gone) > 2 * self._most_kept:
                self._gone.popitem(last=False)
