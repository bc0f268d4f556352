"""Notes for the user: modules log to their own loggers, and a block of work shows its notes.

A module writes `log = logging.getLogger(__name__)`, then `log.info(text)`, or `log.warning(text)`
for a possible problem. Without a listener the defaults of `logging` apply: warnings go to standard
error, nothing else is shown. Several runs may share one process, so a note belongs to the context
(`contextvars`) that logs it: start each thread of a run in a copy of the run's context.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

LOGGER = logging.getLogger("practicum")

_listeners: ContextVar[tuple["Listener", ...]] = ContextVar("listeners", default=())
_attached: set["Listener"] = set()
_level = logging.NOTSET
"""The logger's own level while a listener holds the logger at INFO."""
_level_lock = threading.Lock()


class Listener(logging.Handler):
    """Pass each note of its contexts to `event` as one text, with warnings marked as such."""

    def __init__(self, event: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._event = event

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if the note comes from a context that this listener belongs to."""
        return self in _listeners.get() and bool(super().filter(record))

    def emit(self, record: logging.LogRecord) -> None:
        """Pass the text to `event`; an exception of `event` reaches the code that logged the note."""
        text = record.getMessage()
        self._event(f"warning: {text}" if record.levelno >= logging.WARNING else text)


@contextmanager
def show_notes(event: Callable[[str], None]) -> Iterator[None]:
    """Pass the block's notes only to `event`, not to outer blocks: `with show_notes(print): ...`."""
    with _listening((Listener(event),)):
        yield


def are_notes_shown() -> bool:
    """Return True if an outer block shows, copies or hides the notes of this context."""
    return bool(_listeners.get())


@contextmanager
def hide_notes() -> Iterator[None]:
    """Drop the notes of the block."""
    with show_notes(lambda text: None):
        yield


@contextmanager
def copy_notes(event: Callable[[str], None]) -> Iterator[None]:
    """Pass the notes of the block to `event` in addition to the outer listeners."""
    with _listening((*_listeners.get(), Listener(event))):
        yield


@contextmanager
def _listening(listeners: tuple[Listener, ...]) -> Iterator[None]:
    """Set the listeners of the block; only the last of them is new."""
    _attach(listeners[-1])
    token = _listeners.set(listeners)
    try:
        yield
    finally:
        _listeners.reset(token)
        _detach(listeners[-1])


def _attach(listener: Listener) -> None:
    # The logger is shared by all runs of the process. Its level may fall to INFO only while some
    # listener exists; otherwise an application that embeds the library would see its logs change.
    global _level
    with _level_lock:
        if not _attached:
            _level = LOGGER.level
            LOGGER.setLevel(min(_level or logging.INFO, logging.INFO))
        _attached.add(listener)
        LOGGER.addHandler(listener)


def _detach(listener: Listener) -> None:
    with _level_lock:
        _attached.remove(listener)
        LOGGER.removeHandler(listener)
        listener.close()
        if not _attached:
            LOGGER.setLevel(_level)
