"""Hold the answers that clients fetch later, and bound how many requests may wait."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from practicum.server.refusals import HttpRefusal


@dataclass(frozen=True, slots=True)
class ResponseBody:
    """The body of a finished request, protobuf or JSON; `is_error` if it could not be executed."""

    body: bytes
    media_type: str
    is_error: bool = False


class Futures:
    """Requests by id.

    Finished answers stay until newer answers need the space, so that a client can fetch an answer
    again after a broken connection. More than `max_open` unfinished requests are refused with 429.
    Only the answer of a finished request is kept: its future holds two kilobytes of locks, and the
    callbacks of all waiting clients.

    Requests begin on the event loop and finish on the worker's thread; a lock guards what both
    change.
    """

    def __init__(
        self, max_open: int = 4096, max_bytes: int = 2**28, max_answers: int = 2**14
    ) -> None:
        self._open: dict[str, Future[ResponseBody]] = {}
        self._answers: OrderedDict[str, ResponseBody | None] = OrderedDict()
        self._expired: OrderedDict[str, None] = OrderedDict()
        self._answer_bytes = 0
        self._lock = threading.Lock()
        self._max_open = max_open
        self._max_bytes = max_bytes
        self._max_answers = max_answers

    def open(
        self,
        request_id: str,
        begin: Callable[[], "Future[ResponseBody]"],
        *,
        retry_errors: bool = False,
    ) -> None:
        """Begin a request unless its id has begun, so that a request sent twice is done once.

        With `retry_errors` a request that ended with an error begins again.
        """
        if retry_errors:
            self._drop_error(request_id)
        if request_id in self:
            return
        with self._lock:
            # Tidied here and not when a request finishes, so that its client can fetch even an
            # answer that is larger than `max_bytes`.
            self._tidy()
            if len(self._open) >= self._max_open:
                raise HttpRefusal(
                    429, f"{self._max_open} requests are waiting; ask again later", retry_after=1
                )
        future = begin()
        with self._lock:
            self._open[request_id] = future
        # Added after the entry, because the callback of a finished future runs here and now.
        future.add_done_callback(partial(self._keep_answer, request_id))

    def get(self, request_id: str) -> "Future[ResponseBody]":
        """Return the future of a request.

        Raise `HttpRefusal` with 410 if its answer has been dropped and with 404 if there was no
        such request.
        """
        with self._lock:
            if request_id in self._open:
                return self._open[request_id]
            if request_id in self._answers:
                return _build_future(self._answers[request_id])
        if request_id in self._expired:
            raise HttpRefusal(410, f"the answer to {request_id} is no longer kept; ask again")
        raise HttpRefusal(404, f"there is no request {request_id!a:.80}")

    def __contains__(self, request_id: str) -> bool:
        """Return True if the request waits or has an answer."""
        with self._lock:
            return request_id in self._open or request_id in self._answers

    def _keep_answer(self, request_id: str, future: "Future[ResponseBody]") -> None:
        """Keep an answer, or None for a cancelled request; runs on the thread that finished it."""
        answer = None if future.cancelled() else future.result()
        with self._lock:
            self._answers[request_id] = answer
            self._answer_bytes += _count_bytes(answer)
            del self._open[request_id]

    def _drop_error(self, request_id: str) -> None:
        """Drop the answer to a request if it is an error."""
        with self._lock:
            answer = self._answers.get(request_id)
            if answer is not None and answer.is_error:
                del self._answers[request_id]
                self._answer_bytes -= _count_bytes(answer)

    def _tidy(self) -> None:
        """Drop the oldest answers if they are too many or too large together; needs the lock."""
        while self._answers and (
            self._answer_bytes > self._max_bytes or len(self._answers) > self._max_answers
        ):
            request_id, answer = self._answers.popitem(last=False)
            self._answer_bytes -= _count_bytes(answer)
            self._expired[request_id] = None
            if len(self._expired) > 2 * self._max_answers:
                self._expired.popitem(last=False)


def _build_future(answer: ResponseBody | None) -> "Future[ResponseBody]":
    """Return a future with this answer, or a cancelled one for None."""
    future: Future[ResponseBody] = Future()
    if answer is None:
        future.cancel()
        future.set_running_or_notify_cancel()
    else:
        future.set_result(answer)
    return future


def _count_bytes(answer: ResponseBody | None) -> int:
    return 0 if answer is None else len(answer.body)
