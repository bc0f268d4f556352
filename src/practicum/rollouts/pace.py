"""Call the environments of many conversations, one after another or in parallel threads.

A thread serves one conversation, so the same thread opens, steps and closes an episode, as browsers
and event loops require. At most `Pace.at_once` calls run at the same time; other calls wait for a
permit.
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
"""The interval at which cancellation and deadlines are checked."""

CLOSE_SECONDS = 5.0
"""The maximum time to wait for episodes to close after the last conversation."""


@dataclass(slots=True)
class InTurn:
    """Calls one environment after another, in the caller's thread."""

    answers: dict[int, Answer] = field(default_factory=dict)
    failures: dict[int, Exception] = field(default_factory=dict)

    def ask(self, number: int, call: Callable[[], Answer]) -> None:
        """Call the environment immediately."""
        self.answers[number] = call()

    def collect(self, *, wait: bool) -> dict[int, Answer]:
        """Return all answers since the last call."""
        answers, self.answers = self.answers, {}
        return answers

    def close(self, number: int, call: Callable[[], Exception | None]) -> None:
        """Close the episode immediately."""
        if (failure := call()) is not None:
            self.failures[number] = failure

    def finish(self) -> dict[int, Exception]:
        """Return the errors raised while closing episodes."""
        return self.failures


@dataclass(slots=True)
class _RunningCall:
    """A running call: the time at which it got its permit, and whether the permit was released."""

    begun: float | None = None
    is_over: bool = False


class SideBySide:
    """Calls environments in parallel, with one thread per conversation.

    A conversation gets a TimeoutError once its calls have taken `Pace.seconds` in total. Its thread
    is abandoned: it closes the episode when its call returns, and it does not keep the process alive.
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
        """Start a call in the conversation's thread."""
        self._calls[number] = record = _RunningCall()

        def run() -> None:
            self._permits.acquire()
            record.begun = time.monotonic()
            # Foreign code may end its thread, for example with sys.exit; report this as an error.
            answer: Answer = RuntimeError("the environment ended its thread")
            try:
                answer = call()
            finally:
                self._give_back(record)
                self._answers.put((number, record, answer))

        self._find_inbox(number).put(run)

    def _give_back(self, call: _RunningCall) -> bool:
        """Release a call's permit; return False if it was already released."""
        with self._lock:
            was_over, call.is_over = call.is_over, True
        if not was_over:
            self._permits.release()
        return not was_over

    def collect(self, *, wait: bool) -> dict[int, Answer]:
        """Return the finished answers, and a TimeoutError for each conversation past its deadline."""
        answers: dict[int, Answer] = {}
        while self._calls:
            abandon.check()
            self._take_answers(answers, POLL_SECONDS if wait and not answers else 0.0)
            self._end_late_calls(answers)
            if answers or not wait:
                break
        return answers

    def _take_answers(self, answers: dict[int, Answer], seconds: float) -> None:
        """Move answers from the threads to `answers`; wait up to `seconds` for the first answer."""
        try:
            while self._calls:
                number, record, answer = (
                    self._answers.get(timeout=seconds) if seconds else (self._answers.get_nowait())
                )
                seconds = 0.0
                # The conversation of an answer after the deadline is already over.
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
        """Answer conversations past their deadline with a TimeoutError."""
        limit = self._pace.seconds
        if limit is None:
            return
        moment = time.monotonic()
        for number, call in list(self._calls.items()):
            start = moment if call.begun is None else call.begun
            if self._spent.get(number, 0.0) + moment - start < limit:
                continue
            # Release the permit for another conversation: hanging calls must not use up all permits.
            if self._give_back(call):
                del self._calls[number]
                self._threads.pop(number)
                answers[number] = TimeoutError(
                    f"the environment took more than rollout.episodes.seconds, {limit:g} s"
                )

    def close(self, number: int, call: Callable[[], Exception | None]) -> None:
        """Close the episode in its thread, after a call that may still be running."""

        def run() -> None:
            if (failure := call()) is not None:
                self._failures[number] = failure

        inbox = self._find_inbox(number)
        inbox.put(run)
        inbox.put(None)

    def finish(self) -> dict[int, Exception]:
        """Wait up to `CLOSE_SECONDS` for the remaining threads; return the errors of closing."""
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads.values():
            thread.join(max(deadline - time.monotonic(), 0.0))
        return dict(self._failures)

    def _find_inbox(self, number: int) -> "queue.SimpleQueue[Callable[[], None] | None]":
        """Return the call queue of a conversation's thread; start the thread if needed."""
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
    """Run the queued calls in order until a None arrives."""
    while (call := inbox.get()) is not None:
        # The caller has been notified or has cancelled; the episode must still be closed here.
        with contextlib.suppress(abandon.Cancelled, SystemExit):
            call()


Asker = InTurn | SideBySide
"""Calls the environments of conversations, which are identified by their numbers."""


def open_asker(pace: Pace) -> Asker:
    """Return the asker for the given pace."""
    return InTurn() if pace.at_once == 1 and pace.seconds is None else SideBySide(pace)
