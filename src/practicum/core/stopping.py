"""Stop signals: the first one ends the work after the current step, a second one at once."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from practicum.core.options import spell_options
from practicum.errors import Interrupted

Stop = Callable[[], int | None]
"""A function that returns the number of the signal that asks to stop, or None to go on."""

STOP_NOTICE = b"\nstopping after this step; interrupt once more to stop at once\n"


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
    try:
        yield lambda: received[0] if received else None
    except KeyboardInterrupt:
        go_on = f"go on with {spell_options(resume=True)}"
        reason = f"stopped at once; the newest checkpoint is untouched, {go_on}"
        raise Interrupted(signal.SIGINT, reason) from None
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
