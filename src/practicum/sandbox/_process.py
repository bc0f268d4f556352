"""Starting a sandboxed process, and talking to it in lines, each with a deadline and a largest size."""

import json
import os
import selectors
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from practicum.errors import SandboxError
from practicum.sandbox._walls import missing

START_SECONDS = 60.0
CLOSE_SECONDS = 5.0
_ROOM = Path(__file__).parents[2]
# -I and -S: nothing of the environment, the working folder or site-packages; this package alone is added to the path.
_KEEPER = (
    "import sys; sys.path.append(sys.argv[1]); from practicum.sandbox._keeper import main; main()"
)
_SYSTEM = (
    "/usr",
    "/lib",
    "/lib32",
    "/lib64",
    "/bin",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/nix/store",
    "/gnu/store",
)


class NoLine(Exception):
    """The process sent no line in time, more than was asked for, or ended."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a process may use at most; it is always one process, which writes no file."""

    memory: int = 4 << 30
    """Bytes of address space."""
    descriptors: int = 64
    """Open files and pipes."""


@dataclass(frozen=True)
class Sandbox:
    """How to start processes within walls; `readable` are the folders beneath which they may read and execute."""

    limits: Limits = Limits()
    required: bool = True
    """Refuse to start where a wall cannot stand; otherwise start within those that can."""
    readable: Sequence[str] | None = None
    """None: what Python needs, see `python_folders`."""

    def start(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> "SandboxedProcess":
        """Start a command with this environment and nothing else of it; raise SandboxError where a wall is missing."""
        refuse = self.required and missing()
        if refuse:
            raise SandboxError(_refusal(refuse))
        lifeline, held = os.pipe()
        report, reporting = os.pipe()
        chosen = dict(environment or {})
        described = {
            "command": list(command),
            "environment": chosen,
            "readable": list(python_folders(chosen) if self.readable is None else self.readable),
            "required": self.required,
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
            [sys.executable, "-I", "-S", "-c", _KEEPER, str(_ROOM), json.dumps(described)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(lifeline, reporting),
            env={},
            bufsize=0,
            # Ctrl-C is for the run, which finishes its step and still needs its tools.
            start_new_session=True,
        )
        os.close(lifeline)
        os.close(reporting)
        process = SandboxedProcess(keeper, held)
        try:
            _check_report(report, self.required)
        except SandboxError:
            process.close()
            raise
        finally:
            os.close(report)
        return process


class SandboxedProcess:
    """A running process that reads lines from its standard input and answers on its standard output."""

    def __init__(self, keeper: subprocess.Popen[bytes], lifeline: int) -> None:
        assert keeper.stdin is not None and keeper.stdout is not None
        self._input = keeper.stdin.fileno()
        self._output = keeper.stdout.fileno()
        for pipe in (self._input, self._output):
            os.set_blocking(pipe, False)
        self._end = weakref.finalize(self, _end, keeper, lifeline)

    def send(self, line: bytes, seconds: float) -> None:
        """Write a line; raise NoLine where the process does not read it in time."""
        until = time.monotonic() + seconds
        rest = memoryview(line + b"\n")
        while rest:
            try:
                rest = rest[os.write(self._input, rest) :]
            except BlockingIOError:
                if not _is_ready(self._input, selectors.EVENT_WRITE, until):
                    raise NoLine(f"over {seconds:g} s") from None
            except OSError as error:
                raise NoLine("its process ended by itself") from error

    def receive(self, seconds: float, largest: int) -> bytes:
        """Read the one line that is due; raise NoLine where it is late, longer than `largest` bytes, or not alone."""
        until = time.monotonic() + seconds
        line = b""
        while not line.endswith(b"\n"):
            if not _is_ready(self._output, selectors.EVENT_READ, until):
                raise NoLine(f"over {seconds:g} s")
            part = os.read(self._output, 1 << 16)
            line += part
            if not part:
                raise NoLine("its process ended by itself")
            if len(line) > largest:
                raise NoLine(f"more than {largest} bytes")
            if b"\n" in line[:-1]:
                raise NoLine("more than one line")
        return line[:-1]

    def has_more(self) -> bool:
        """Return whether the process has written anything that nobody asked for."""
        try:
            return bool(os.read(self._output, 1))
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Kill the process and all that belongs to it, and wait until it is gone."""
        self._end()


def _is_ready(pipe: int, event: int, until: float) -> bool:
    """Wait until a pipe can be read or written; return whether it can before the clock says `until`."""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, event)
        return bool(selector.select(timeout=max(0.0, until - time.monotonic())))


def python_folders(environment: Mapping[str, str]) -> list[str]:
    """Return the folders that this Python and its packages are read from, without any that holds the user's home."""
    named = [
        *sys.path,
        *environment.get("PYTHONPATH", "").split(os.pathsep),
        sys.prefix,
        sys.base_prefix,
    ]
    named += environment.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    folders = {
        Path(name).resolve() for name in (*named, *_SYSTEM) if name and Path(name).is_absolute()
    }
    home = Path.home().resolve()
    return sorted(
        str(folder) for folder in folders if folder.exists() and folder not in (home, *home.parents)
    )


def _check_report(report: int, required: bool) -> None:
    """Read how it went until the process is started; raise SandboxError where it is not."""
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
    if required and json.loads(first)["missing"]:
        raise SandboxError(_refusal(json.loads(first)["missing"]))


def _refusal(lacks: Sequence[str]) -> str:
    return f"this machine cannot wall off {'; '.join(lacks)}"


def _end(keeper: subprocess.Popen[bytes], lifeline: int) -> None:
    os.close(lifeline)
    try:
        keeper.wait(CLOSE_SECONDS)
    except subprocess.TimeoutExpired:
        # The kernel kills the process with its keeper.
        keeper.kill()
        keeper.wait()
    for pipe in (keeper.stdin, keeper.stdout):
        if pipe is not None:
            pipe.close()
