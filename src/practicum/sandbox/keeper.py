"""Keep a sandboxed process: start it within walls, end with it or with the run.

The keeper is a separate program that only uses the standard library, `python -I -S -c "..."`: see
`practicum.sandbox`. A single thread starts the process, so that the kernel can end the process
with its keeper. The walls are set up between fork and exec. The run itself cannot do this safely,
because its numerical libraries have threads.
"""

import contextlib
import json
import math
import os
import select
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
from typing import Any

from practicum.sandbox.isolation import die_with_parent, isolate_process

COMMAND = struct.Struct("=d")
"""A command of the run: see `practicum.sandbox.SandboxedProcess.resume`."""

LOOK_SECONDS = 0.1
"""The time between two looks at the processor time of a call."""


def main() -> None:
    """Keep one process as the last argument describes: see `practicum.sandbox.Sandbox.start`."""
    settings = json.loads(sys.argv[-1])
    home_dir = tempfile.mkdtemp(prefix="practicum-sandbox-")
    keeper = os.getpid()
    process = os.fork()
    if process == 0:
        _enter(settings, home_dir, keeper)
    os.close(settings["report"])
    os.closerange(0, 2)
    threading.Thread(
        target=_end_with_run, args=(settings["lifeline"], process), daemon=True
    ).start()
    # The process is reaped after its group is killed: until then no other process gets its number.
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    _kill(process)
    _, status = os.waitpid(process, 0)
    shutil.rmtree(home_dir, ignore_errors=True)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _end_with_run(lifeline: int, process: int) -> None:
    """Follow the run's commands; kill the process when the run closes its end or is gone.

    A command is a number: 0 stops the process, and n > 0 lets it run for n seconds of processor
    time, after which it is killed.
    """
    clock = _find_processor_clock(process)
    limit = math.inf
    while True:
        # Only a call has a limit: between calls nothing is looked at.
        seconds = None if limit == math.inf else LOOK_SECONDS
        if select.select([lifeline], [], [], seconds)[0]:
            command = os.read(lifeline, COMMAND.size)
            if len(command) < COMMAND.size:
                break
            (budget,) = COMMAND.unpack(command)
            limit = _read_clock(clock) + budget if budget else math.inf
            # Its threads belong to it, and it has no children while no call runs.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process, signal.SIGCONT if budget else signal.SIGSTOP)
        elif _read_clock(clock) > limit:
            break
    _kill(process)


def _find_processor_clock(process: int) -> int:
    """Return the clock of a process's processor time (MAKE_PROCESS_CPUCLOCK of Linux)."""
    return (~process << 3) | 2


def _read_clock(clock: int) -> float:
    """Return the seconds of a processor clock; 0 where the machine has none, or it ended."""
    try:
        return time.clock_gettime(clock)
    except (OSError, AttributeError):
        return 0.0


def _kill(process: int) -> None:
    """Kill the process and its group, which it cannot leave."""
    for kill in (os.kill, os.killpg):
        # It has ended, or it does not lead a group yet.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(process, signal.SIGKILL)


def _enter(settings: dict[str, Any], home_dir: str, keeper: int) -> None:
    """Become the process; an error goes to the report, which closes with exec."""
    try:
        os.setsid()
        die_with_parent(keeper)
        report = settings["report"]
        os.set_inheritable(report, False)
        os.closerange(3, report)
        os.closerange(report + 1, settings["descriptors"])
        environment, lacks = {**os.environ, **settings["environment"]}, []
        if settings["walls"]:
            os.chdir(home_dir)
            readable = [*settings["readable"], home_dir]
            lacks = isolate_process(readable, settings["limits"], forks=settings["forks"])
            environment |= {"HOME": home_dir, "TMPDIR": home_dir}
        os.write(report, json.dumps({"missing": lacks}).encode())
        if not lacks or not settings["required"]:
            os.execve(settings["command"][0], settings["command"], environment)
    except OSError as error:
        os.write(settings["report"], b"\n" + json.dumps({"failed": str(error)}).encode())
    finally:
        os._exit(1)
