"""Long waits: code reports slow operations and their progress, and a display shows them.

    with show_wait("answers", total=36) as wait:
        for prompt in prompts:
            ...
            wait.advance()

Waits nest: "evaluating" may hold "answers" and then "scores". Without a display they cost nothing.
Like notes, they belong to a context (`contextvars`), so that several runs may share one process.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Optional

Display = Callable[["Wait"], None]
"""A function that is called when a wait begins, moves and ends."""


@dataclass(slots=True, eq=False)
class Wait:
    """A long wait: its name, the wait around it, and how much is done of the total, if known."""

    name: str
    total: int | None
    outer: Optional["Wait"]
    display: Display | None
    progress: int = 0
    is_over: bool = False
    started: float = field(default_factory=lambda: time.monotonic())

    @property
    def path(self) -> str:
        """Return the names from the outermost wait to this one."""
        return self.name if self.outer is None else f"{self.outer.path}: {self.name}"

    def advance(self, count: int = 1) -> None:
        """Count some more as done."""
        self.move_to(self.progress + count)

    def move_to(self, progress: int) -> None:
        """Set how much is done."""
        self.progress = progress
        if self.display is not None:
            self.display(self)


_display: ContextVar[Display | None] = ContextVar("display", default=None)
_innermost: ContextVar[Wait | None] = ContextVar("innermost", default=None)


@contextmanager
def show_wait(name: str, total: int | None = None) -> Iterator[Wait]:
    """Show the block as one long wait; the block says how much is done."""
    wait = Wait(name, total, _innermost.get(), _display.get())
    token = _innermost.set(wait)
    wait.move_to(0)
    try:
        yield wait
    finally:
        _innermost.reset(token)
        wait.is_over = True
        wait.move_to(wait.progress)


@contextmanager
def display_waits(display: Display | None) -> Iterator[None]:
    """Show the waits of the block on a display, or nowhere."""
    token, outer = _display.set(display), _innermost.set(None)
    try:
        yield
    finally:
        _display.reset(token)
        _innermost.reset(outer)
