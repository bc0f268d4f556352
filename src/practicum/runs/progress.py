"""Open the console that fits where the code runs, and show the progress of a block on it."""

import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import TextIO

from practicum.core.notes import are_notes_shown, show_notes
from practicum.core.waits import display_waits
from practicum.runs.console import (
    Console,
    JsonConsole,
    LiveConsole,
    PlainConsole,
    SilentConsole,
    join_lines,
)
from practicum.text import make_printable


def open_console(*, as_json: bool = False, stream: TextIO | None = None) -> Console:
    """Return the console for `stream`, which is standard output by default."""
    stream = stream or sys.stdout
    # Python has no standard output if it was closed when the process started.
    if stream is None:
        return SilentConsole()
    if as_json:
        return JsonConsole(stream)
    if stream.isatty() and os.environ.get("TERM") != "dumb":
        return LiveConsole(stream)
    if is_notebook():
        # The output of a cell needs the report, which is slow to import.
        from practicum.runs.notebook import NotebookConsole

        return NotebookConsole(stream)
    return PlainConsole(stream)


def is_notebook() -> bool:
    """Return True if the code runs in the kernel of a notebook."""
    # Only a kernel has imported ipykernel's application; importing IPython here would be slow.
    kernel = sys.modules.get("ipykernel.kernelapp")
    return kernel is not None and kernel.IPKernelApp.initialized()


@contextmanager
def show_progress(console: Console | None = None, *, progress: bool = True) -> Iterator[Console]:
    """Show the notes and long waits of the block, and yield the console that shows them.

    Without a console, one is opened on standard output, except if `progress` is off or if an outer
    block shows the notes already.
    """
    if console is None and (not progress or are_notes_shown()):
        yield SilentConsole()
        return
    screen = console or open_console()
    # The caller closes its own console: it may show a second run on it.
    with (
        nullcontext() if console else closing(screen),
        show_notes(lambda text: screen.event(make_printable(join_lines(text)))),
        display_waits(screen.wait),
    ):
        yield screen
