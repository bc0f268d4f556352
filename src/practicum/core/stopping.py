"""Being told to stop: the first signal ends the work after the step in hand, a second one at once."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from practicum.errors import Interrupted

Stop = Callable[[], int | None]
"""Says whether to stop: the number of the signal that asks for it, or None."""

STOP_NOTICE = b"\nstopping after this step; interrupt once more to stop at once\n"


@contextmanager
def catch_stop_signals() -> Iterator[Stop]:
    """Within the block the first SIGINT or SIGTERM is noted and the second SIGINT stops at once."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def note(number: int, frame: object) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt  # no `except Exception` of a library swallows or renames it on the way out
        received.append(number)
        with suppress(OSError):  # nobody may be listening any more
            os.write(
                2, STOP_NOTICE
            )  # not through a stream, whose own writing may be what was interrupted

    earlier = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received[0] if received else None
    except KeyboardInterrupt:
        lost = "stopped at once; the newest checkpoint is untouched, go on with --resume"
        raise Interrupted(signal.SIGINT, lost) from None
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
