"""Stop signals: the first one ends the work after the current step, a second one at once."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from practicum.core.options import spell_options
from practicum.errors import Interrupted

Stop = Callable[[], int | None]
"""A function that returns the number of the signal that requests a stop, or None to continue."""

STOP_NOTICE = b"\nstopping after this step; interrupt again to stop at once\n"


_received: ContextVar[list[int]] = ContextVar("received")
"""The signals that the context's run has received."""


def raise_if_stopping(state: str) -> None:
    """Raise Interrupted if a signal has asked to stop, for waits that may take hours.

    `state` says what becomes of the step.
    """
    if received := _received.get([]):
        name, go_on = signal.Signals(received[0]).name, spell_options(resume=True)
        raise Interrupted(
            received[0], f"stopped by {name} within a step; {state}, resume with {go_on}"
        )


@contextmanager
def catch_stop_signals() -> Iterator[Stop]:
    """Note the first SIGINT or SIGTERM within the block; a second SIGINT stops at once."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def note(number: int, frame: object) -> None:
        if received and number == signal.SIGINT:
            # KeyboardInterrupt, because an `except Exception` of a library must not swallow it.
            raise KeyboardInterrupt
        received.append(number)
        # Not through a stream: the signal may have interrupted that stream's own write. The
        # terminal may also be gone.
        with suppress(OSError):
            os.write(2, STOP_NOTICE)

    earlier = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    token = _received.set(received)
    try:
        yield lambda: received[0] if received else None
    except KeyboardInterrupt:
        go_on = f"resume with {spell_options(resume=True)}"
        reason = f"stopped at once; the newest checkpoint is untouched, {go_on}"
        raise Interrupted(signal.SIGINT, reason) from None
    finally:
        _received.reset(token)
        for number, handler in earlier.items():
            signal.signal(number, handler)
