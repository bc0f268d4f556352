"""Sharing one thread between jobs: lanes, turns, cancelled work, and models that do not fit together."""

import threading
import time

import pytest

from practicum.server.futures import ResponseBody
from practicum.server.worker import ModelJob, Worker


def failed(error):
    return ResponseBody(f"{type(error).__name__}: {error}".encode(), "")


@pytest.fixture
def worker():
    made = Worker(failed)
    yield made
    made.close(10.0)


class Endless:
    """Works in steps until it is told to end."""

    def __init__(self):
        self.begun = threading.Event()
        self.end = threading.Event()
        self.closed = threading.Event()

    def run(self, items):
        self.begun.set()
        try:
            while not self.end.wait(0.005):
                yield
            return [ResponseBody(str(item).encode(), "") for item in items]
        finally:
            self.closed.set()


def stepped(items):
    for _ in range(3):
        yield
    return [ResponseBody(str(item).encode(), "") for item in items]


def test_small_work_is_done_while_large_work_goes_on(worker):
    large = Endless()
    slow = worker.submit(ModelJob("large", large.run, "weights", lane=1))
    assert large.begun.wait(10)
    for key in ("weights", "other"):
        assert worker.submit(ModelJob(key, stepped, key, lane=0)).result(10).body == key.encode()
    assert (
        worker.submit(ModelJob(None, lambda items: [ResponseBody(b"trained", "")])).result(10).body
        == b"trained"
    )
    assert not slow.done()
    large.end.set()
    assert slow.result(10).body == b"large"


def test_a_lane_holds_one_batch_at_a_time_and_no_lane_waits_for_ever(worker):
    first, second = Endless(), Endless()
    one = worker.submit(ModelJob(1, first.run, "x", lane=1))
    assert first.begun.wait(10)
    two = worker.submit(ModelJob(2, second.run, "y", lane=1))
    for _ in range(5):
        worker.submit(ModelJob(3, stepped, "z", lane=0)).result(10)
    assert not second.begun.is_set()
    first.end.set()
    assert one.result(10).body == b"1" and second.begun.wait(10)
    second.end.set()
    assert two.result(10).body == b"2"


def test_what_is_being_done_can_be_cancelled(worker):
    large = Endless()
    futures = [worker.submit(ModelJob(number, large.run, "x", lane=1)) for number in range(2)]
    assert large.begun.wait(10)
    assert futures[0].cancel()
    assert not large.closed.wait(0.1)  # a caller still waits for the second one
    assert futures[1].cancel()
    assert large.closed.wait(10) and not large.end.is_set()
    assert worker.submit(ModelJob(4, stepped, "x", lane=1)).result(10).body == b"4"


def test_a_failure_in_steps_reaches_all_of_its_batch(worker):
    def broken(items):
        yield
        raise ValueError("no")

    held = worker.submit(ModelJob(None, lambda items: [time.sleep(0.2) or ResponseBody(b"", "")]))
    futures = [worker.submit(ModelJob(number, broken, "x", lane=0)) for number in range(3)]
    held.result(10)
    assert {future.result(10).body for future in futures} == {b"ValueError: no"}


def test_a_model_that_does_not_fit_waits_until_nothing_is_in_progress_and_is_next():
    worker = Worker(failed, fits=lambda base: base == "a")
    large = Endless()
    done: list[str] = []

    def note(items):
        done.extend(items)
        return [ResponseBody(b"", "")] * len(items)

    slow = worker.submit(ModelJob("large", large.run, "x", lane=1, base="a"))
    assert large.begun.wait(10)
    waiting = [
        worker.submit(ModelJob(name, note, base=base))
        for name, base in (("b", "b"), ("later", "a"))
    ]
    assert not waiting[0].done() and not done
    large.end.set()
    for future in (slow, *waiting):
        future.result(10)
    assert done == ["b", "later"]
    worker.close(10.0)


def test_closing_cancels_what_is_done_in_steps():
    worker = Worker(failed)
    large = Endless()
    future = worker.submit(ModelJob("large", large.run, "x", lane=1))
    assert large.begun.wait(10)
    assert worker.close(10.0)
    assert future.cancelled() and large.closed.is_set()
