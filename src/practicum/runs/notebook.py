"""Show the progress of a run in a notebook: lines as text, and one line that moves in place."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from practicum.core.waits import Wait
from practicum.report.markup import escape_text
from practicum.runs.console import PlainConsole, format_table, format_wait

REDRAW_SECONDS = 0.25


class NotebookConsole(PlainConsole):
    """A console of a notebook cell.

    Steps and waits share one line, which is redrawn at most four times a second.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._line: Any = None
        self._drawn = 0.0

    def step(self, step: int, metrics: Mapping[str, float], sample: tuple[str, str] | None) -> None:
        """Move the line to `step 3/20 | KL 0.212 | ...`; the last step stays."""
        self._draw(self._format_step(step, metrics, sample), is_due=step == self._pace.total)

    def wait(self, wait: Wait) -> None:
        """Move the line to `answers 12/36 | 0:40, 1:20 left`."""
        self._draw(format_wait(wait))

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Show a table; a frontend without HTML shows it as text."""
        head = "".join(f"<th>{escape_text(column)}</th>" for column in columns)
        body = "".join(
            f"<tr>{''.join(f'<td>{escape_text(cell)}</td>' for cell in row)}</tr>" for row in rows
        )
        markup = f"<table><caption>{escape_text(title)}</caption><tr>{head}</tr>{body}</table>"
        _display({"text/html": markup, "text/plain": format_table(title, columns, rows)})

    def close(self) -> None:
        """Keep the current line; the next run of the cell draws a new line."""
        self._line = None

    def _draw(self, text: str, *, is_due: bool = False) -> None:
        """Redraw the line, unless it was just drawn."""
        time_point = time.monotonic()
        if not is_due and time_point - self._drawn < REDRAW_SECONDS:
            return
        self._drawn = time_point
        content = {"text/plain": text, "text/html": f"<pre>{escape_text(text)}</pre>"}
        if self._line is None:
            self._line = _display(content)
        else:
            self._line.update(content, raw=True)


def _display(content: Mapping[str, str]) -> Any:
    """Show content in the cell, and return the handle that can change it."""
    from IPython.display import display

    return display(dict(content), raw=True, display_id=True)
