"""Show the progress of a run on a console for people or for programs.

`LiveConsole` draws on a terminal, `PlainConsole` writes lines, `JsonConsole` writes for programs,
and `SilentConsole` shows nothing. Steps count from 1, like checkpoints. See
`practicum.runs.progress` for which one is opened.
"""

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TextIO

from practicum.core.waits import Wait
from practicum.text import make_printable

LABELS = {
    "reverse_kl": "KL",
    "drafts/acceptance": "acceptance",
    "reward": "reward",
    "length": "length",
    "tokens_per_second": "tok/s",
}
"""The metrics on the progress line with their labels; missing metrics are left out."""
_SAMPLE_WIDTH = 160


class Console(Protocol):
    """The display of a run's progress, for a person or a program.

    `begin` comes before the first `step`, and `close` after everything, also after an error;
    `finish` closes too. In a pipeline every stage begins and finishes, and then the pipeline
    finishes.
    """

    def event(self, text: str) -> None:
        """Show one message."""

    def begin(self, total_steps: int, first_step: int) -> None:
        """Announce that training starts at `first_step`, which is above 1 in a resumed run."""

    def step(self, step: int, metrics: Mapping[str, float], sample: tuple[str, str] | None) -> None:
        """Show a finished step; `sample` is a prompt and its answer, already printable."""

    def wait(self, wait: Wait) -> None:
        """Show how far a long wait is; called when it begins, moves and ends."""

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Show a small table."""

    def finish(self, summary: Mapping[str, object]) -> None:
        """Show the summary of a finished run."""

    def close(self) -> None:
        """Release the terminal; closing twice is allowed."""


class SilentConsole:
    """A console that shows nothing."""

    def event(self, text: str) -> None:
        """Show nothing."""

    def begin(self, total_steps: int, first_step: int) -> None:
        """Show nothing."""

    def step(self, step: int, metrics: Mapping[str, float], sample: tuple[str, str] | None) -> None:
        """Show nothing."""

    def wait(self, wait: Wait) -> None:
        """Show nothing."""

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Show nothing."""

    def finish(self, summary: Mapping[str, object]) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Do nothing: the terminal was never taken."""


class PlainConsole:
    """Plain lines without colours or cursor movement: at most one line per step."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = _SafeStream(stream)
        self._pace = _TimeEstimate(0, 1)
        self._patience = _Patience()

    def event(self, text: str) -> None:
        """Write one line."""
        self._patience.renew()
        self._stream.write(join_lines(text) + "\n")

    def begin(self, total_steps: int, first_step: int) -> None:
        """Start the clock."""
        self._pace = _TimeEstimate(total_steps, first_step)

    def step(self, step: int, metrics: Mapping[str, float], sample: tuple[str, str] | None) -> None:
        """Write `step 3/20 | KL 0.212 | length 34 | 0:12, 1:04 left | Q: 8 times 7? A: 56`."""
        self._patience.renew()
        self._stream.write(self._format_step(step, metrics, sample) + "\n")

    def wait(self, wait: Wait) -> None:
        """Write `answers 12/36 | 0:40, 1:20 left` after ten silent seconds, then less often."""
        if self._patience.is_over():
            self._stream.write(format_wait(wait) + "\n")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Write columns padded to their widest cell."""
        self._stream.write(format_table(title, columns, rows) + "\n")

    def finish(self, summary: Mapping[str, object]) -> None:
        """Write one line for each entry."""
        self._stream.write("".join(f"{line}\n" for line in _format_summary(summary)))

    def close(self) -> None:
        """Do nothing: the terminal was never taken."""

    def _format_step(
        self, step: int, metrics: Mapping[str, float], sample: tuple[str, str] | None
    ) -> str:
        """Record a finished step, and return its line."""
        self._pace.record(step)
        parts = [f"step {step}/{self._pace.total}", *_format_metrics(metrics), self._pace.format()]
        if sample is not None:
            parts.append(_format_sample(sample))
        return " | ".join(parts)


class JsonConsole:
    """A console of strict JSON lines, each with the name of the call as its `event`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = _SafeStream(stream)
        self._patience = _Patience()

    def event(self, text: str) -> None:
        """Write `{"event": "event", "text": ...}`."""
        self._write("event", {"text": text})

    def begin(self, total_steps: int, first_step: int) -> None:
        """Write `{"event": "begin", "total_steps": ..., "first_step": ...}`."""
        self._write("begin", {"total_steps": total_steps, "first_step": first_step})

    def step(self, step: int, metrics: Mapping[str, float], sample: tuple[str, str] | None) -> None:
        """Write `{"event": "step", "step": 3, "metrics": ..., "sample": {"prompt", "answer"}}`."""
        pair = None if sample is None else {"prompt": sample[0], "answer": sample[1]}
        self._write("step", {"step": step, "metrics": metrics, "sample": pair})

    def wait(self, wait: Wait) -> None:
        """Write `{"event": "wait", "what": ..., "done": 12, "total": 36}` after silent seconds."""
        if self._patience.is_over():
            self._write("wait", {"what": wait.path, "done": wait.progress, "total": wait.total})

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Write `{"event": "table", "title": ..., "columns": [...], "rows": [[...]]}`."""
        self._write("table", {"title": title, "columns": columns, "rows": rows})

    def finish(self, summary: Mapping[str, object]) -> None:
        """Write `{"event": "finish", "summary": {...}}`."""
        self._write("finish", {"summary": summary})

    def close(self) -> None:
        """Do nothing: the terminal was never taken."""

    def _write(self, event: str, fields: Mapping[str, object]) -> None:
        if event != "wait":
            self._patience.renew()
        content = _replace_nonfinite({"event": event, **fields})
        self._stream.write(json.dumps(content, allow_nan=False, default=str) + "\n")


class LiveConsole:
    """A progress line at the bottom of the terminal, the latest sample under it, and the wait."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console as RichConsole
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Table
        from rich.text import Text

        self._pace = _TimeEstimate(0, 1)
        self._metrics: list[str] = []
        self._sample = ""
        self._waits: list[Wait] = []
        self._task = None
        self._text, self._table, self._group = Text, Table, Group
        safe_stream: Any = _SafeStream(stream)
        self._console = RichConsole(file=safe_stream, highlight=False)
        columns = [
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(24),
            TextColumn("{task.description}"),
        ]
        self._progress = Progress(*columns, console=self._console, auto_refresh=False)
        self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self._render)

    def event(self, text: str) -> None:
        """Print one line above the progress line."""
        self._console.print(self._text(join_lines(text)))

    def begin(self, total_steps: int, first_step: int) -> None:
        """Start the clock and show the progress line."""
        self._pace = _TimeEstimate(total_steps, first_step)
        # In a pipeline, the task of the stage before is still shown.
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task("", total=total_steps, completed=first_step - 1)
        self._live.start()

    def step(self, step: int, metrics: Mapping[str, float], sample: tuple[str, str] | None) -> None:
        """Move the progress line."""
        self._metrics = _format_metrics(metrics)
        self._pace.record(step)
        if sample is not None:
            self._sample = _format_sample(sample)
        if self._task is not None:
            self._progress.update(self._task, completed=step)
        self._live.refresh()

    def wait(self, wait: Wait) -> None:
        """Show the wait that began last; the clock moves by itself."""
        if wait.is_over:
            self._waits.remove(wait)
        elif wait not in self._waits:
            self._waits.append(wait)
            self._live.start()

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table above the progress line."""
        table = self._table(title=self._text(title))
        for column in columns:
            table.add_column(self._text(column))
        for row in rows:
            table.add_row(*(self._text(cell) for cell in row))
        self._console.print(table)

    def finish(self, summary: Mapping[str, object]) -> None:
        """Keep the last progress line, and print the summary under it."""
        self.close()
        for line in _format_summary(summary):
            self._console.print(self._text(line))

    def close(self) -> None:
        """Stop redrawing and show the cursor again."""
        # Without a step, no line needs to remain on the screen.
        self._live.transient = self._task is None
        self._live.stop()

    def _render(self) -> Any:
        """Return the progress line and the sample; called four times a second for the clock."""
        # A copy: waits begin and end in other threads while the screen is drawn.
        waits = [format_wait(wait) for wait in self._waits[-1:]]
        lines = [self._text(line, overflow="ellipsis", no_wrap=True) for line in waits]
        if self._task is None:
            return self._group(*lines)
        description = " | ".join([*self._metrics, self._pace.format()])
        self._progress.update(self._task, description=description)
        return self._group(
            self._progress.get_renderable(),
            self._text(self._sample, overflow="ellipsis", no_wrap=True),
            *lines,
        )


class _TimeEstimate:
    """The elapsed and the remaining time of a run, by the monotonic clock."""

    def __init__(self, total: int, first: int) -> None:
        self.total = total
        self._first = first
        self._start = self._latest = time.monotonic()
        self._steps = 0

    def record(self, step: int) -> None:
        """Record that a step is finished."""
        self._latest = time.monotonic()
        self._steps = step - self._first + 1

    def format(self) -> str:
        """Return `"0:12, 1:04 left"`, at the mean pace of the finished steps."""
        time_point = time.monotonic()
        elapsed = _format_seconds(time_point - self._start)
        if self._steps < 1:
            return elapsed
        seconds_per_step = (self._latest - self._start) / self._steps
        steps_to_go = self.total - self._first + 1 - self._steps
        # The time since the newest step is part of the next one.
        remaining = seconds_per_step * steps_to_go - (time_point - self._latest)
        return f"{elapsed}, {_format_seconds(remaining)} left"


class _Patience:
    """Says when a wait has been silent for long enough to show a sign of life.

    The first time is after ten seconds; each further one takes twice as long, up to a minute.
    """

    FIRST, LONGEST = 10.0, 60.0

    def __init__(self) -> None:
        self._silence = self.FIRST
        self._since = time.monotonic()

    def renew(self) -> None:
        """Count the silence from now on, because a line was shown."""
        self._silence, self._since = self.FIRST, time.monotonic()

    def is_over(self) -> bool:
        """Return True if it is time for a line, and count the silence from now on."""
        time_point = time.monotonic()
        if time_point - self._since < self._silence:
            return False
        self._silence, self._since = min(2 * self._silence, self.LONGEST), time_point
        return True


class _SafeStream:
    """A text stream that writes any character in any encoding and outlives its reader.

    Characters that the encoding lacks are written as escapes. After the reader closes the pipe
    (`| head`), the rest is discarded.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_closed = False
        self.encoding = stream.encoding or "utf-8"

    def write(self, text: str) -> int:
        if not self._is_closed:
            encodable = text.encode(self.encoding, "backslashreplace").decode(self.encoding)
            try:
                self._stream.write(encodable)
                self._stream.flush()
            except (OSError, ValueError):
                self._discard_rest()
        return len(text)

    def flush(self) -> None:
        """Do nothing: every write is flushed."""

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def _discard_rest(self) -> None:
        self._is_closed = True
        # The interpreter flushes standard output at exit. Its descriptor is redirected to the null
        # device, so that this flush does not fail either. A closed stream has no descriptor.
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)


def format_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text, its columns padded to their widest cell."""
    cells = [[join_lines(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    return "\n".join([join_lines(title), *lines])


def format_wait(wait: Wait) -> str:
    """Return `evaluating: answers 12/36 | 0:40, 1:20 left`."""
    elapsed = time.monotonic() - wait.started
    text = make_printable(wait.path)
    clock = _format_seconds(elapsed)
    if wait.total is None:
        return f"{text} {wait.progress} | {clock}" if wait.progress else f"{text} | {clock}"
    if 0 < wait.progress < wait.total:
        remaining = elapsed * (wait.total - wait.progress) / wait.progress
        clock = f"{clock}, {_format_seconds(remaining)} left"
    return f"{text} {wait.progress}/{wait.total} | {clock}"


def _format_metrics(metrics: Mapping[str, float]) -> list[str]:
    labels = LABELS
    if "reverse_kl_estimated" in metrics:
        labels = LABELS | {"reverse_kl": "KL (estimate)"}
    return [
        f"{label} {_format_number(metrics[name])}"
        for name, label in labels.items()
        if name in metrics
    ]


def _format_number(number: float) -> str:
    """Return the number with three digits, but never with an exponent if it is large."""
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"


def _format_sample(sample: tuple[str, str]) -> str:
    prompt, answer = (join_lines(text) for text in sample)
    return f"Q: {_shorten(prompt, _SAMPLE_WIDTH // 2)} A: {_shorten(answer, _SAMPLE_WIDTH)}"


def _format_summary(summary: Mapping[str, object]) -> list[str]:
    lines = []
    for name, entry in summary.items():
        text = f"{entry:.4g}" if isinstance(entry, float) else str(entry)
        lines.append(f"{name}: {join_lines(text)}")
    return lines


def join_lines(text: str) -> str:
    """Return a text on one line, with single spaces."""
    return " ".join(text.split())


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _format_seconds(seconds: float) -> str:
    """Return `"1:04"` or `"2:00:09"`."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _replace_nonfinite(content: Any) -> Any:
    """Return the content with None for each number, at any depth, that strict JSON cannot hold."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: _replace_nonfinite(entry) for key, entry in content.items()}
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        return [_replace_nonfinite(entry) for entry in content]
    return content
