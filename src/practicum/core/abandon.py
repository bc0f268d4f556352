"""Cancellation of work that a thread does ahead of time: slow operations check whether to continue."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event

_cancel_event: ContextVar[Event | None] = ContextVar("cancel_event", default=None)


class Cancelled(Exception):
    """The work of this thread is no longer needed; the caller that cancelled it expects this."""


@contextmanager
def cancel_scope(event: Event) -> Iterator[None]:
    """Let `check` raise Cancelled in this thread within the block, once `event` is set."""
    token = _cancel_event.set(event)
    try:
        yield
    finally:
        _cancel_event.reset(token)


def get_cancel_event() -> Event | None:
    """Return the event that cancels this thread's work, or None outside a `cancel_scope`."""
    return _cancel_event.get()


def check() -> None:
    """Raise Cancelled if the work of this thread is no longer needed."""
    event = _cancel_event.get()
    if event is not None and event.is_set():
        raise Cancelled
