"""Run programs that are not trusted in a process without files, network, children or secrets.

    process = Sandbox(ProcessLimits()).start([sys.executable, "-P", "-m", "some_module"])
    process.send(b"a question", seconds=5)
    answer = process.receive(seconds=5, largest=65536)
    process.close()

The process reads the folders that Python needs and writes none. It has an empty home and only the
environment from its caller. It cannot open a socket, start another process, signal or trace one,
or leave its group. It dies with the run, however that ends. The walls are Landlock, a filter of
system calls (seccomp) and resource limits of Linux; they need no rights. A machine that cannot put
up a wall is refused, unless `required` is false: then `missing()` returns what to tell the user.
"""

from pathlib import Path

from practicum.sandbox.imports import find_places
from practicum.sandbox.isolation import missing
from practicum.sandbox.process import (
    NoLine,
    ProcessLimits,
    Sandbox,
    SandboxedProcess,
    TooSlow,
)

LAUNCHER = str(Path(__file__).with_name("launch_child.py"))
"""The program that runs a module with packages at given places."""

__all__ = [
    "LAUNCHER",
    "NoLine",
    "ProcessLimits",
    "Sandbox",
    "SandboxedProcess",
    "TooSlow",
    "find_places",
    "missing",
]
