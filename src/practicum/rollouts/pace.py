"""Ask the environments of many conversations: one after another, or side by side in threads.

A thread serves one conversation, so an episode is opened, stepped and closed by the same thread, as
browsers and event loops want it. Calls wait for a permit, of which there are `Pace.at_once`.
"""

import contextlib
import contextvars
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from practicum.core import abandon
from practicum.ports import Observation
from practicum.types import Pace

Answer = Observation | Exception
"""The answer of an environment, or its failure."""

POLL_SECONDS = 0.2
"""The longest wait before a cancellation and the deadlines are looked at again."""

CLOSE_SECONDS = 5.0
"""The longest wait for episodes to close after the last conversation."""


@dataclass(slots=True)
class InTurn:
    """Asks one environment after another, in the caller's thread."""

    answers: dict[int, Answer] = field(default_factory=dict)
    failures: dict[int, Exception] = field(default_factory=dict)

    def ask(self, number: int, call: Callable[[], Answer]) -> None:
        """Ask at once."""
        self.answers[number] = call()

    def collect(self, *, wait: bool) -> dict[int, Answer]:
        """Return all answers since the last call."""
        answers, self.answers = self.answers, {}
        return answers

    def close(self, number: int, call: Callable[[], Exception | None]) -> None:
        """Close at once."""
        if (failure := call()) is not None:
            self.failures[number] = failure

    def finish(self) -> dict[int, Exception]:
        """Return the failures to close."""
        return self.failures


@dataclass(slots=True)
class _RunningCall:
    """A call under way: when it got its permit, and whether somebody has given that back."""

    begun: float | None = None
    is_over: bool = False


class SideBySide:
    """Asks environments in threads of their own.

    A conversation whose calls have taken `Pace.seconds` in all gets a TimeoutError. Its thread is
    left behind: it closes the episode whenever its call returns, and does not keep the process.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._permits = threading.Semaphore(pace.at_once)
        self._lock = threading.Lock()
        self._inboxes: dict[int, queue.SimpleQueue[Callable[[], None] | None]] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._calls: dict[int, _RunningCall] = {}
        self._spent: dict[int, float] = {}
        self._answers: queue.SimpleQueue[tuple[int, _RunningCall, Answer]] = queue.SimpleQueue()
        self._failures: dict[int, Exception] = {}

    def ask(self, number: int, call: Callable[[], Answer]) -> None:
        """Begin to ask in the conversation's thread."""
        self._calls[number] = record = _RunningCall()

        def run() -> None:
            self._permits.acquire()
            record.begun = time.monotonic()
            # Foreign code may end its thread, as sys.exit does: nobody waits for that.
            answer: Answer = RuntimeError("the environment ended its thread")
            try:
                answer = call()
            finally:
                self._give_back(record)
                self._answers.put((number, record, answer))

        self._find_inbox(number).put(run)

    def _give_back(self, call: _RunningCall) -> bool:
        """Give back a call's permit; return False if that was done already."""
        with self._lock:
            was_over, call.is_over = call.is_over, True
        if not was_over:
            self._permits.release()
        return not was_over

    def collect(self, *, wait: bool) -> dict[int, Answer]:
        """Return the answers that are there, and those that the deadline gave."""
        answers: dict[int, Answer] = {}
        while self._calls:
            abandon.check()
            self._take_answers(answers, POLL_SECONDS if wait and not answers else 0.0)
            self._end_late_calls(answers)
            if answers or not wait:
                break
        return answers

    def _take_answers(self, answers: dict[int, Answer], seconds: float) -> None:
        """Move answers from the threads to `answers`; wait a while for the first one."""
        try:
            while self._calls:
                number, record, answer = (
                    self._answers.get(timeout=seconds) if seconds else (self._answers.get_nowait())
                )
                seconds = 0.0
                # An answer after the deadline finds its conversation over.
                if self._calls.get(number) is not record:
                    continue
                del self._calls[number]
                assert record.begun is not None, "a call that answered has begun"
                seconds_spent = time.monotonic() - record.begun
                self._spent[number] = self._spent.get(number, 0.0) + seconds_spent
                answers[number] = answer
        except queue.Empty:
            pass

    def _end_late_calls(self, answers: dict[int, Answer]) -> None:
        """Give the conversations whose time is up a TimeoutError in place of an answer."""
        limit = self._pace.seconds
        if limit is None:
            return
        moment = time.monotonic()
        for number, call in list(self._calls.items()):
            start = moment if call.begun is None else call.begun
            if self._spent.get(number, 0.0) + moment - start < limit:
                continue
            # The permit goes to another conversation: calls that hang must not use up all of them.
            if self._give_back(call):
                del self._calls[number]
                self._threads.pop(number)
                answers[number] = TimeoutError(
                    f"the environment took more than rollout.episodes.seconds, {limit:g} s"
                )

    def close(self, number: int, call: Callable[[], Exception | None]) -> None:
        """Close the episode in its thread, after the call that it may still be in."""

        def run() -> None:
            if (failure := call()) is not None:
                self._failures[number] = failure

        inbox = self._find_inbox(number)
        inbox.put(run)
        inbox.put(None)

    def finish(self) -> dict[int, Exception]:
        """Wait a while for the threads that nobody gave up, and return the failures to close."""
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads.values():
            thread.join(max(deadline - time.monotonic(), 0.0))
        return dict(self._failures)

    def _find_inbox(self, number: int) -> "queue.SimpleQueue[Callable[[], None] | None]":
        """Return the calls that a conversation's thread takes; the first call starts the thread."""
        if number not in self._inboxes:
            inbox = self._inboxes[number] = queue.SimpleQueue()
            # Notes and cancellations belong to the context of the run.
            context = contextvars.copy_context()
            thread = threading.Thread(
                target=lambda: context.run(_serve, inbox), name=f"episode {number}", daemon=True
            )
            self._threads[number] = thread
            thread.start()
        return self._inboxes[number]


def _serve(inbox: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    """Run calls in order until there is a None."""
    while (call := inbox.get()) is not None:
        # Whoever asked is told or has cancelled; the episode still has to be closed here.
        with contextlib.suppress(abandon.Cancelled, SystemExit):
            call()


Asker = InTurn | SideBySide
"""Asks the environments of conversations, which are named by their numbers."""


def open_asker(pace: Pace) -> Asker:
    """Return what asks at the given pace."""
    return InTurn() if pace.at_once == 1 and pace.seconds is None else SideBySide(pace)
