import io
import json
import os
import pty
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from practicum.runs import console as tracking
from practicum.runs.console import Console, JsonConsole, LiveConsole, PlainConsole, SilentConsole
from practicum.runs.progress import open_console

METRICS = {"reverse_kl": 0.21234, "length": 34.0, "tokens_per_second": 1234.5}
SAMPLE = ("What is 8 times 7?", "56, since 8 \u00d7 7 = 56 \u4f60\u597d [bold]not markup[/bold]")


def drive(console: Console, steps: int = 3) -> None:
    console.event("loading the teacher")
    console.begin(steps, 1)
    for step in range(1, steps + 1):
        console.step(step, METRICS, SAMPLE)
    console.table("Results", ["task", "pass@1"], [["reverse", "0.5"], ["arithmetic", "0.25"]])
    console.finish({"reverse_kl": 0.1, "steps": steps})
    console.close()


class AsciiStream(io.TextIOWrapper):
    """The encoding of standard output under LANG=C without UTF-8 mode."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="ascii", errors="strict", newline="\n")

    def text(self) -> str:
        self.seek(0)
        return self.read()


def test_plain_console_writes_one_line_a_step_without_escapes() -> None:
    stream = io.StringIO()
    drive(PlainConsole(stream))
    lines = stream.getvalue().splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 3
    assert steps[1].startswith(
        "step 2/3 | KL 0.212 | length 34 | tok/s 1234 | 0:00, 0:00 left | Q: What is 8 times 7? A: "
    )
    assert "\x1b" not in stream.getvalue()
    assert "[bold]not markup[/bold]" in steps[0]
    assert lines[-2:] == ["reverse_kl: 0.1", "steps: 3"]
    assert "reverse     0.5" in lines


@pytest.mark.parametrize("kind", [PlainConsole, LiveConsole, JsonConsole])
def test_an_ascii_stream_gets_escapes_instead_of_an_error(kind: type) -> None:
    stream = AsciiStream()
    drive(kind(stream))
    assert "\\xd7" in stream.text() or "\\u00d7" in stream.text()


@pytest.mark.parametrize("kind", [PlainConsole, LiveConsole, JsonConsole])
def test_a_lone_surrogate_is_written_as_an_escape(kind: type) -> None:
    stream = AsciiStream()
    console = kind(stream)
    console.event("half \ud83d of a pair")
    console.close()
    assert "\\ud83d" in stream.text()


@pytest.mark.parametrize("kind", [PlainConsole, LiveConsole, JsonConsole])
def test_a_closed_stream_is_no_reason_to_stop(kind: type) -> None:
    stream = io.StringIO()
    console = kind(stream)
    console.begin(3, 1)
    stream.close()
    console.step(1, METRICS, SAMPLE)
    console.event("still alive")
    console.close()


def test_json_console_writes_strict_json_lines() -> None:
    stream = io.StringIO()
    console = JsonConsole(stream)
    console.begin(2, 2)
    console.step(2, {"reverse_kl": float("inf")}, ("a\nb", "\x1b[31m"))
    console.finish({"best": float("nan"), "where": Path("runs")})
    rows = [json.loads(line, parse_constant=pytest.fail) for line in stream.getvalue().splitlines()]
    assert rows == [
        {"event": "begin", "total_steps": 2, "first_step": 2},
        {
            "event": "step",
            "step": 2,
            "metrics": {"reverse_kl": None},
            "sample": {"prompt": "a\nb", "answer": "\x1b[31m"},
        },
        {"event": "finish", "summary": {"best": None, "where": "runs"}},
    ]
    assert "\x1b" not in stream.getvalue()


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    drive(SilentConsole())
    assert capsys.readouterr().out == ""


def test_open_console_looks_at_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(open_console(stream=io.StringIO()), PlainConsole)
    assert isinstance(open_console(as_json=True, stream=io.StringIO()), JsonConsole)
    monkeypatch.setattr(sys, "stdout", None)
    assert isinstance(open_console(), SilentConsole)


def test_time_left_follows_the_steps_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(tracking.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    console = PlainConsole(stream)
    console.begin(20, 11)
    now[0] += 60
    console.step(12, {}, None)
    assert stream.getvalue() == "step 12/20 | 1:00, 4:00 left\n"
    now[0] += 7200
    console.step(20, {}, None)
    assert stream.getvalue().splitlines()[-1] == "step 20/20 | 2:01:00, 0:00 left"


def test_a_wall_clock_that_jumps_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking.time, "time", lambda: pytest.fail("the wall clock was read"))
    drive(PlainConsole(io.StringIO()))


def test_live_console_draws_on_a_terminal_and_gives_the_cursor_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    reader, writer = pty.openpty()
    seen: list[bytes] = []

    def read() -> None:
        while True:
            try:
                data = os.read(reader, 65536)
            except OSError:
                return
            if not data:
                return
            seen.append(data)

    thread = threading.Thread(target=read)
    thread.start()
    with open(writer, "w", encoding="utf-8") as stream:
        console = open_console(stream=stream)
        assert isinstance(console, LiveConsole)
        drive(console)
    thread.join(10)
    os.close(reader)
    text = b"".join(seen).decode()
    assert "\x1b[?25l" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert "step 3/3" in plain
    assert "KL 0.212" in plain
    assert "[bold]not markup[/bold]" in plain
    assert "pass@1" in plain


def test_head_does_not_stop_the_run_and_lang_c_does_not_either(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import pathlib, sys
        from practicum.runs.progress import open_console
        assert "torch" not in sys.modules and "rich" not in sys.modules
        console = open_console()
        console.begin(5000, 1)
        for step in range(1, 5001):
            console.step(step, {"reverse_kl": 0.5}, ("\\u4f60", "\\u597d"))
        console.finish({})
        pathlib.Path(sys.argv[1]).write_text("done")
    """)
    environment = {
        "PATH": os.environ["PATH"],
        "LANG": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }
    done = tmp_path / "done"
    with subprocess.Popen(
        [sys.executable, "-c", script, str(done)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        # The remaining time is computed from the clock.
        assert re.match(
            rb"step 1/5000 \| KL 0\.5 \| 0:0\d, \d+:\d\d left \| Q: \\u4f60 A: ",
            process.stdout.readline(),
        )
        process.stdout.close()
        complaints = process.stderr.read()
        assert process.wait(30) == 0, complaints
    assert complaints == b""
    assert done.read_text() == "done"
