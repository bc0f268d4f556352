"""The keeper of a sandboxed process: starts it within walls, and ends with it or with the run, whichever comes first.

It runs as a program of its own with the standard library only, `python -I -S -c "..."`: see `practicum.sandbox`. It has one
thread that starts the process, so that the kernel can end the process with it; the walls are put up between fork and exec,
where the run itself, with the threads of its mathematics, could not do so.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from typing import Any

from practicum.sandbox._walls import die_with_parent, put_up


def main() -> None:
    """Keep one process, described by the last argument: see `practicum.sandbox.Sandbox.start`."""
    described = json.loads(sys.argv[-1])
    home = tempfile.mkdtemp(prefix="practicum-sandbox-")
    keeper = os.getpid()
    process = os.fork()
    if process == 0:
        _enter(described, home, keeper)
    os.close(described["report"])
    for descriptor in (0, 1):
        os.close(descriptor)
    threading.Thread(
        target=_end_with_run, args=(described["lifeline"], process), daemon=True
    ).start()
    # Not reaped before its group is killed: until then nobody else can get its number.
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    _kill(process)
    _, status = os.waitpid(process, 0)
    shutil.rmtree(home, ignore_errors=True)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _end_with_run(lifeline: int, process: int) -> None:
    """Wait until the run closes its end, or is gone, and kill the process."""
    os.read(lifeline, 1)
    _kill(process)


def _kill(process: int) -> None:
    """Kill the process and its group, which it cannot leave."""
    for kill in (os.kill, os.killpg):
        try:
            kill(process, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            # Gone, or not yet the leader of a group.
            continue


def _enter(described: dict[str, Any], home: str, keeper: int) -> None:
    """Become the process; never returns. What is wrong is written to the report, which closes with exec."""
    try:
        os.setsid()
        die_with_parent(keeper)
        report = described["report"]
        os.set_inheritable(report, False)
        os.closerange(3, report)
        os.closerange(report + 1, described["descriptors"])
        os.chdir(home)
        lacks = put_up([*described["readable"], home], described["limits"])
        os.write(report, json.dumps({"missing": lacks}).encode())
        if not lacks or not described["required"]:
            environment = {**described["environment"], "HOME": home, "TMPDIR": home}
            os.execve(described["command"][0], described["command"], environment)
    except OSError as error:
        os.write(described["report"], b"\n" + json.dumps({"failed": str(error)}).encode())
    finally:
        os._exit(1)
