"""Notes for the user: every module logs to its own logger, and a block of work shows what it notes in one place.

A module writes `log = logging.getLogger(__name__)`, then `log.info(text)`, or `log.warning(text)` for what may be wrong. Where
nobody listens logging's own rules hold: warnings go to standard error, all else nowhere. Several runs may go on in one process, so
a note belongs to the context (`contextvars`) in which it is logged: who starts a thread for a run lets it run in a copy of its own.
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
"""The logger's own level, while the listeners of some block have it at INFO."""
_attaching = threading.Lock()


class Listener(logging.Handler):
    """Hand each note of the contexts that it listens to on as one text, a warning with the word before it."""

    def __init__(self, event: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._event = event

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the note is of a context that is listened to."""
        return self in _listeners.get() and bool(super().filter(record))

    def emit(self, record: logging.LogRecord) -> None:
        """Hand the text on; what `event` raises goes up to whoever logged, as it would from a call."""
        text = record.getMessage()
        self._event(f"warning: {text}" if record.levelno >= logging.WARNING else text)


@contextmanager
def show_notes(event: Callable[[str], None]) -> Iterator[None]:
    """Hand the notes of the block to `event`, and to no block around it: `with show_notes(print): ...`."""
    with _listening((Listener(event),)):
        yield


@contextmanager
def hide_notes() -> Iterator[None]:
    """Show nobody the notes of the block."""
    with show_notes(lambda text: None):
        yield


@contextmanager
def copy_notes(event: Callable[[str], None]) -> Iterator[None]:
    """Hand the notes of the block to `event` too, and show them as they would be without it."""
    with _listening((*_listeners.get(), Listener(event))):
        yield


@contextmanager
def _listening(listeners: tuple[Listener, ...]) -> Iterator[None]:
    """Let these listen to the block, of which the last is new."""
    _attach(listeners[-1])
    token = _listeners.set(listeners)
    try:
        yield
    finally:
        _listeners.reset(token)
        _detach(listeners[-1])


def _attach(listener: Listener) -> None:
    """Add a listener; the logger lets information through as long as there is one."""
    global _level
    with _attaching:
        if not _attached:
            _level = LOGGER.level
            LOGGER.setLevel(min(_level or logging.INFO, logging.INFO))
        _attached.add(listener)
        LOGGER.addHandler(listener)


def _detach(listener: Listener) -> None:
    """Remove a listener, and with the last one the level that it asked for."""
    with _attaching:
        _attached.remove(listener)
        LOGGER.removeHandler(listener)
        listener.close()
        if not _attached:
            LOGGER.setLevel(_level)
