"""Requests that begin on one thread and finish on another."""

import gc
import sys
import threading
import weakref
from concurrent.futures import Future
from queue import SimpleQueue

import pytest

from practicum.server.futures import Futures, ResponseBody


@pytest.fixture
def hasty():
    """Let threads switch at almost every instruction."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_requests_begin_while_others_finish_on_another_thread(hasty):
    futures = Futures(max_open=10**6, max_bytes=3000, max_answers=500)
    queue: SimpleQueue[Future[ResponseBody]] = SimpleQueue()
    count = 4000

    def finish() -> None:
        for _ in range(count):
            queue.get().set_result(ResponseBody(b"1234567890", ""))

    def begin() -> Future[ResponseBody]:
        future: Future[ResponseBody] = Future()
        queue.put(future)
        return future

    thread = threading.Thread(target=finish, daemon=True)
    thread.start()
    for number in range(count):
        futures.open(str(number), begin)
    thread.join()
    futures.open("last", begin)
    assert sum(name in futures for name in map(str, range(count))) == 300


def test_a_kept_answer_holds_on_to_nobody_who_waited_for_it() -> None:
    """A future keeps the callbacks of all waiting callers; each retrieval adds some, with everything that they hold."""

    class Waiting:
        def __call__(self, future: Future[ResponseBody]) -> None:
            """Do nothing."""

    futures, future, waiting = Futures(), Future[ResponseBody](), Waiting()
    futures.open("r", lambda: future)
    futures.get("r").add_done_callback(waiting)
    future.set_result(ResponseBody(b"1", "text/plain"))
    gone = weakref.ref(waiting)
    del future, waiting
    assert gone() is None and futures.get("r").result().body == b"1"


def test_what_is_kept_of_a_request_is_its_answer_alone() -> None:
    """Keep an answer and its bytes: no future, no lock, no queue of waiting callers; each kept future was twelve objects."""
    futures, count = Futures(), 200

    def answered(request_id: str) -> None:
        future: Future[ResponseBody] = Future()
        futures.open(request_id, lambda: future)
        future.set_result(ResponseBody(b"1", "text/plain"))

    answered("first")
    gc.collect()
    before = len(gc.get_objects())
    for number in range(count):
        answered(str(number))
    gc.collect()
    assert len(gc.get_objects()) - before <= count + 10


def test_a_request_that_could_not_begin_is_not_waited_for() -> None:
    futures = Futures()

    def begin() -> Future[ResponseBody]:
        raise ValueError("not today")

    with pytest.raises(ValueError, match="not today"):
        futures.open("r", begin)
    assert "r" not in futures


def test_a_cancelled_request_stays_cancelled() -> None:
    futures, future = Futures(max_open=1), Future[ResponseBody]()
    futures.open("r", lambda: future)
    futures.get("r").cancel()
    assert futures.get("r").cancelled()
    futures.open("the next, which nothing stands before", Future[ResponseBody])
