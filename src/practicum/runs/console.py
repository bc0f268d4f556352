"""What a run says while it runs: rows for machines, and a console for people.

`open_console` picks one of four consoles: `LiveConsole` on a terminal, `PlainConsole` elsewhere, `JsonConsole` for
programs, `SilentConsole` for none. Steps count from 1, as the names of checkpoints do.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

# Metrics worth a place on the progress line, with their labels; those that a run does not have are left out.
SHOWN = {"reverse_kl": "KL", "reward": "reward", "length": "length", "tokens_per_second": "tok/s"}
_SAMPLE_WIDTH = 160


@runtime_checkable
class Console(Protocol):
    """Where a run tells a person or a program how it goes.

    `begin` comes before the first `step`, `close` after everything, also after an error; `finish` closes too. In a
    pipeline every stage begins and finishes, and then the whole finishes.
    """

    def event(self, text: str) -> None:
        """Say one thing that happened."""
        ...

    def begin(self, total_steps: int, first_step: int) -> None:
        """Training starts at `first_step`, which is past 1 in a resumed run."""
        ...

    def step(self, step: int, metrics: Mapping[str, float], sample: tuple[str, str] | None) -> None:
        """One step is done; `sample` is a prompt and its answer, already made printable."""
        ...

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Show a small table."""
        ...

    def finish(self, summary: Mapping[str, object]) -> None:
        """The run is over, and this is what came of it."""
        ...

    def close(self) -> None:
        """Give the terminal back; closing twice is allowed."""
        ...


@runtime_checkable
class Stream(Protocol):
    """As much of a text file as a console needs."""

    def write(self, text: str, /) -> int: ...

    def flush(self) -> None: ...

    def isatty(self) -> bool: ...

    def fileno(self) -> int: ...


class MetricsLog:
    """One row a step, through whatever appends rows: `MetricsLog(journal.append).log(3, {"kl": 0.2})`."""

    def __init__(self, append: Callable[[Mapping[str, object]], None]) -> None:
        self._append = append

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the step's metrics; those that are not finite become null, which strict JSON can hold."""
        self._append({"step": step, **_finite(metrics)})


def open_console(*, as_json: bool = False, stream: Stream | None = None) -> Console:
    """The console for `stream`, which is standard output unless it is given; Python has none if it was closed."""
    stream = stream or sys.stdout
    if stream is None:
        return SilentConsole()
    if as_json:
        return JsonConsole(stream)
    if stream.isatty() and os.environ.get("TERM") != "dumb":
        return LiveConsole(stream)
    return PlainConsole(stream)


class SilentConsole:
    """A console that says nothing."""

    def event(self, text: str) -> None:
        """Say nothing."""

    def begin(self, total_steps: int, first_step: int) -> None:
        """Say nothing."""

    def step(self, step: int, metrics: Mapping[str, float], sample: tuple[str, str] | None) -> None:
        """Say nothing."""

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Say nothing."""

    def finish(self, summary: Mapping[str, object]) -> None:
        """Say nothing."""

    def close(self) -> None:
        """Nothing to give back."""


class PlainConsole:
    """Plain lines without colours or cursor movement: at most one line a step."""

    def __init__(self, stream: Stream) -> None:
        self._stream = _SafeStream(stream)
        self._pace = _TimeEstimate(0, 1)

    def event(self, text: str) -> None:
        """One line."""
        self._stream.write(_one_line(text) + "\n")

    def begin(self, total_steps: int, first_step: int) -> None:
        """Start the clock."""
        self._pace = _TimeEstimate(total_steps, first_step)

    def step(self, step: int, metrics: Mapping[str, float], sample: tuple[str, str] | None) -> None:
        """`step 3/20 | KL 0.212 | length 34 | 0:12, 1:04 left | Q: 8 times 7? A: 56`."""
        parts = [f"step {step}/{self._pace.total}", *_labelled(metrics), self._pace.after(step)]
        if sample is not None:
            parts.append(_shown_sample(sample))
        self._stream.write(" | ".join(parts) + "\n")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Columns padded to their widest cell."""
        cells = [[_one_line(cell) for cell in row] for row in (columns, *rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        self._stream.write("\n".join([_one_line(title), *lines]) + "\n")

    def finish(self, summary: Mapping[str, object]) -> None:
        """One line for each entry."""
        self._stream.write("".join(f"{line}\n" for line in _summary_lines(summary)))

    def close(self) -> None:
        """Nothing to give back."""


class JsonConsole:
    """One strict JSON object a line, each with the name of the call as its `event`."""

    def __init__(self, stream: Stream) -> None:
        self._stream = _SafeStream(stream)

    def event(self, text: str) -> None:
        """`{"event": "event", "text": ...}`."""
        self._write("event", {"text": text})

    def begin(self, total_steps: int, first_step: int) -> None:
        """`{"event": "begin", "total_steps": ..., "first_step": ...}`."""
        self._write("begin", {"total_steps": total_steps, "first_step": first_step})

    def step(self, step: int, metrics: Mapping[str, float], sample: tuple[str, str] | None) -> None:
        """`{"event": "step", "step": ..., "metrics": {...}, "sample": {"prompt": ..., "answer": ...}}`."""
        shown = None if sample is None else {"prompt": sample[0], "answer": sample[1]}
        self._write("step", {"step": step, "metrics": dict(metrics), "sample": shown})

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """`{"event": "table", "title": ..., "columns": [...], "rows": [[...]]}`."""
        self._write(
            "table", {"title": title, "columns": list(columns), "rows": [list(row) for row in rows]}
        )

    def finish(self, summary: Mapping[str, object]) -> None:
        """`{"event": "finish", "summary": {...}}`."""
        self._write("finish", {"summary": dict(summary)})

    def close(self) -> None:
        """Nothing to give back."""

    def _write(self, event: str, fields: Mapping[str, object]) -> None:
        self._stream.write(
            json.dumps(_finite({"event": event, **fields}), allow_nan=False, default=str) + "\n"
        )


class LiveConsole:
    """A progress line that stays at the bottom of the terminal, with the latest sample under it."""

    def __init__(self, stream: Stream) -> None:
        from rich.console import Console as RichConsole
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Table
        from rich.text import Text

        self._pace = _TimeEstimate(0, 1)
        self._metrics: list[str] = []
        self._sample = ""
        self._task = None
        self._text, self._table, self._group = Text, Table, Group
        self._console = RichConsole(file=_SafeStream(stream), highlight=False)  # pyright: ignore[reportArgumentType]
        columns = [
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(24),
            TextColumn("{task.description}"),
        ]
        self._progress = Progress(*columns, console=self._console, auto_refresh=False)
        self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self._render)

    def event(self, text: str) -> None:
        """One line above the progress line."""
        self._console.print(self._text(_one_line(text)))

    def begin(self, total_steps: int, first_step: int) -> None:
        """Start the clock and show the progress line."""
        self._pace = _TimeEstimate(total_steps, first_step)
        if self._task is not None:
            self._progress.remove_task(self._task)  # that of the stage before
        self._task = self._progress.add_task("", total=total_steps, completed=first_step - 1)
        self._live.start()

    def step(self, step: int, metrics: Mapping[str, float], sample: tuple[str, str] | None) -> None:
        """Move the progress line."""
        self._metrics = _labelled(metrics)
        self._pace.after(step)
        if sample is not None:
            self._sample = _shown_sample(sample)
        if self._task is not None:
            self._progress.update(self._task, completed=step)
        self._live.refresh()

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table above the progress line."""
        table = self._table(title=self._text(title))
        for column in columns:
            table.add_column(self._text(column))
        for row in rows:
            table.add_row(*(self._text(cell) for cell in row))
        self._console.print(table)

    def finish(self, summary: Mapping[str, object]) -> None:
        """Leave the last progress line standing and print the summary under it."""
        self.close()
        for line in _summary_lines(summary):
            self._console.print(self._text(line))

    def close(self) -> None:
        """Stop redrawing and show the cursor again."""
        self._live.stop()

    def _render(self) -> Any:
        """The progress line and the sample, drawn anew four times a second so that the clock moves."""
        if self._task is None:
            return self._text("")
        self._progress.update(
            self._task, description=" | ".join([*self._metrics, self._pace.now()])
        )
        return self._group(
            self._progress.get_renderable(),
            self._text(self._sample, overflow="ellipsis", no_wrap=True),
        )


class _TimeEstimate:
    """How long the run took and will take, by a clock that never jumps."""

    def __init__(self, total: int, first: int) -> None:
        self.total = total
        self._first = first
        self._start = self._latest = time.monotonic()
        self._done = 0

    def after(self, step: int) -> str:
        """Note that `step` is done; `"0:12, 1:04 left"`."""
        self._latest = time.monotonic()
        self._done = step - self._first + 1
        return self.now()

    def now(self) -> str:
        """The time since the start, and the time left at the pace of the steps done so far."""
        now = time.monotonic()
        if self._done < 1:
            return _clock(now - self._start)
        each = (self._latest - self._start) / self._done
        left = each * (self.total - self._first + 1 - self._done) - (now - self._latest)
        return f"{_clock(now - self._start)}, {_clock(left)} left"


class _SafeStream:
    """A text stream that writes any character in any encoding and outlives its reader.

    Characters that the encoding lacks are written as escapes. When the reader goes away (`| head`), what follows goes
    to the null device, so that neither the run nor the interpreter's own last flush fails.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._gone = False
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        if not self._gone:
            try:
                self._stream.write(
                    text.encode(self.encoding, "backslashreplace").decode(self.encoding)
                )
                self._stream.flush()
            except (OSError, ValueError):
                self._give_up()
        return len(text)

    def flush(self) -> None:
        """Every write has been flushed."""

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def _give_up(self) -> None:
        self._gone = True
        with suppress(OSError, ValueError):  # a closed stream has no descriptor, and needs none
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)


def _labelled(metrics: Mapping[str, float]) -> list[str]:
    return [f"{label} {_digits(metrics[name])}" for name, label in SHOWN.items() if name in metrics]


def _digits(value: float) -> str:
    """Three digits, but never an exponent for a large number."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _shown_sample(sample: tuple[str, str]) -> str:
    prompt, answer = (_one_line(text) for text in sample)
    return f"Q: {_shortened(prompt, _SAMPLE_WIDTH // 2)} A: {_shortened(answer, _SAMPLE_WIDTH)}"


def _summary_lines(summary: Mapping[str, object]) -> list[str]:
    shown = {
        name: f"{value:.4g}" if isinstance(value, float) else str(value)
        for name, value in summary.items()
    }
    return [f"{name}: {_one_line(text)}" for name, text in shown.items()]


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _clock(seconds: float) -> str:
    """`"1:04"`, `"2:00:09"`."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _finite(value: Any) -> Any:
    """The value with null for each number, however deep, that strict JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
