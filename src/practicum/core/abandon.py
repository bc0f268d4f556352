"""Work that a thread does ahead of time and that nobody may need any more: whatever can take long asks whether it should go on."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event

_told: ContextVar[Event | None] = ContextVar("told", default=None)


class Cancelled(Exception):
    """Nobody waits for this work any more; whoever told it so expects the exception."""


@contextmanager
def cancel_scope(told: Event) -> Iterator[None]:
    """Within the block, in this thread, work ends with Abandoned soon after `told` is set."""
    token = _told.set(told)
    try:
        yield
    finally:
        _told.reset(token)


def told() -> Event | None:
    """What is set when the work of this thread is not needed any more; None where nobody could say so."""
    return _told.get()


def check() -> None:
    """Abandoned where this work is not needed any more."""
    event = _told.get()
    if event is not None and event.is_set():
        raise Cancelled
