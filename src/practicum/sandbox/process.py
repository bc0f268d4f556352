"""Start a sandboxed process and exchange lines with it, each with a deadline and a largest size."""

import contextlib
import json
import os
import selectors
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from practicum.errors import SandboxError
from practicum.sandbox.imports import list_python_folders
from practicum.sandbox.isolation import missing

START_SECONDS = 60.0
CLOSE_SECONDS = 5.0
_IMPORT_ROOT = Path(__file__).parents[2]
# -I and -S: no environment, working folder or site-packages; only this package joins the path.
_KEEPER = (
    "import sys; sys.path.append(sys.argv[1]); from practicum.sandbox.keeper import main; main()"
)


class NoLine(Exception):
    """The process sent no line in time, sent too much, or ended."""


class TooSlow(NoLine):
    """The process sent or read no line in time."""


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """The limits of a process, which is always a single one and writes no file."""

    memory: int = 4 << 30
    """Bytes of address space."""
    descriptors: int = 64
    """Open files and pipes."""


@dataclass(frozen=True)
class Sandbox:
    """The settings of sandboxed processes, which may read and execute the folders of Python."""

    limits: ProcessLimits = ProcessLimits()
    required: bool = True
    """True to refuse to start if a wall is unavailable; False to start within the available walls."""
    walls: bool = True
    """False for a program that is trusted: it has the files, network and environment of this
    process, and ends with the run all the same."""
    forks: bool = False
    """True for a program that forks children within stricter walls."""

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        readable: Sequence[str] = (),
    ) -> "SandboxedProcess":
        """Start a command with this environment and no other variable.

        It can read the folders and files of `readable` in addition to Python's own.

        Without walls, the variables are added to the environment of this process. Raise
        SandboxError if a required wall is missing.
        """
        if self.required and self.walls:
            _refuse(missing())
        lifeline, run_end = os.pipe()
        report, reporting = os.pipe()
        variables = dict(environment or {})
        settings = {
            "command": list(command),
            "environment": variables,
            "readable": [*list_python_folders(variables), *readable],
            "forks": self.forks,
            "required": self.required,
            "walls": self.walls,
            "lifeline": lifeline,
            "report": reporting,
            "descriptors": max(256, reporting + 1),
            "limits": {
                "RLIMIT_AS": self.limits.memory,
                "RLIMIT_NOFILE": self.limits.descriptors,
                "RLIMIT_FSIZE": 0,
                "RLIMIT_CORE": 0,
            },
        }
        keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _KEEPER, str(_IMPORT_ROOT), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(lifeline, reporting),
            # Not in the arguments, which every user of the machine can read.
            env={} if self.walls else dict(os.environ),
            bufsize=0,
            # Ctrl-C only goes to the run, which still needs the process to finish its step.
            start_new_session=True,
        )
        os.close(lifeline)
        os.close(reporting)
        process = SandboxedProcess(keeper, run_end)
        try:
            _check_report(report, self.required)
        except SandboxError:
            process.close()
            raise
        finally:
            os.close(report)
        return process


class SandboxedProcess:
    """A running process that reads lines from standard input and writes to standard output."""

    def __init__(self, keeper: subprocess.Popen[bytes], lifeline: int) -> None:
        assert keeper.stdin is not None and keeper.stdout is not None
        self._lifeline = lifeline
        self._input = keeper.stdin.fileno()
        self._output = keeper.stdout.fileno()
        for pipe in (self._input, self._output):
            os.set_blocking(pipe, False)
        self._end = weakref.finalize(self, _end, keeper, lifeline)

    def send(self, line: bytes, seconds: float) -> None:
        """Write a line; raise NoLine if the process does not read it in time."""
        until = time.monotonic() + seconds
        remaining = memoryview(line + b"\n")
        while remaining:
            try:
                remaining = remaining[os.write(self._input, remaining) :]
            except BlockingIOError:
                if not _is_ready(self._input, selectors.EVENT_WRITE, until):
                    raise TooSlow(f"over {seconds:g} s") from None
            except OSError as error:
                raise NoLine("its process ended by itself") from error

    def receive(self, seconds: float, largest: int) -> bytes:
        """Return the line that is due.

        Raise NoLine if the line is late, longer than `largest` bytes, or followed by more output.
        """
        until = time.monotonic() + seconds
        parts: list[bytes] = []
        size = 0
        while not parts or not parts[-1].endswith(b"\n"):
            # The clock counts while bytes flow, too: a program may write them without end.
            is_ready = _is_ready(self._output, selectors.EVENT_READ, until)
            if not is_ready or time.monotonic() > until:
                raise TooSlow(f"over {seconds:g} s")
            part = os.read(self._output, 1 << 16)
            if not part:
                raise NoLine("its process ended by itself")
            size += len(part)
            if size > largest:
                raise NoLine(f"more than {largest} bytes")
            if b"\n" in part[:-1]:
                raise NoLine("more than one line")
            parts.append(part)
        return b"".join(parts)[:-1]

    def is_idle(self) -> bool:
        """Return False if the process has ended, or has written anything without a request."""
        try:
            os.read(self._output, 1)
        except BlockingIOError:
            return True
        return False

    def resume(self, seconds: float) -> None:
        """Let the process run until `pause`; it is killed after `seconds` of processor time."""
        self._command(seconds)

    def pause(self) -> None:
        """Stop the process with all its threads, until `resume`."""
        self._command(0.0)

    def _command(self, seconds: float) -> None:
        # A keeper that is gone reads nothing, and its process has ended with it.
        with contextlib.suppress(OSError):
            os.write(self._lifeline, struct.pack("=d", seconds))

    def close(self) -> None:
        """Kill the process with all that belongs to it, and wait until it is gone."""
        self._end()


def _is_ready(pipe: int, event: int, until: float) -> bool:
    """Return True once a pipe can be read or written, and False if the clock reaches `until`."""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, event)
        return bool(selector.select(timeout=max(0.0, until - time.monotonic())))


def _check_report(report: int, required: bool) -> None:
    """Read the keeper's report until the process runs; raise SandboxError if it does not."""
    until = time.monotonic() + START_SECONDS
    text = b""
    while True:
        if not _is_ready(report, selectors.EVENT_READ, until):
            raise SandboxError(f"the sandbox did not start in {START_SECONDS:g} s")
        part = os.read(report, 1 << 16)
        if not part:
            break
        text += part
    first, _, second = text.partition(b"\n")
    if second:
        raise SandboxError(f"the sandbox did not start: {json.loads(second)['failed']}")
    if not first:
        raise SandboxError("the sandbox did not start: its keeper ended by itself")
    if required:
        _refuse(json.loads(first)["missing"])


def _refuse(lacks: Sequence[str]) -> None:
    if lacks:
        raise SandboxError(f"this machine cannot wall off {'; '.join(lacks)}")


def _end(keeper: subprocess.Popen[bytes], lifeline: int) -> None:
    os.close(lifeline)
    try:
        keeper.wait(CLOSE_SECONDS)
    except subprocess.TimeoutExpired:
        # The kernel kills the process with its keeper (PR_SET_PDEATHSIG).
        keeper.kill()
        keeper.wait()
    for pipe in (keeper.stdin, keeper.stdout):
        if pipe is not None:
            pipe.close()
