"""Start runs in copies of a process that has imported everything, instead of a new Python for each.

`WarmStarter` starts the process `python -m practicum.cli.warm`, which forks a child for each run. A
child is as a new process would be: imports leave no state that a run depends on. It ends by itself,
and its crash ends no other run.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from practicum.core.options import spell_options
from practicum.errors import ResourceError

IS_AVAILABLE = sys.platform == "linux"
"""On other systems, the libraries do not support forking a process that has loaded them."""

SHARED_MODELS = "PRACTICUM_SHARED_MODELS"
"""The variable with the folder in which runs share the models that they make from scratch."""

LEARNED = "modules.txt"
"""The file, next to the shared models, with the modules that a run has imported."""

POLL_SECONDS = 0.02

DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux: the signal that a process gets when its parent dies."""

_LIBC = ctypes.CDLL(None) if IS_AVAILABLE else None


class WarmRun:
    """A run that was started by a `WarmStarter`, with the methods of `subprocess.Popen`."""

    def __init__(self, starter: "WarmStarter", pid: int) -> None:
        self.pid = pid
        self._starter = starter

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the run continues."""
        return self._starter.read_code(self.pid, 0.0)

    def wait(self) -> int:
        """Wait for the end, and return the exit code."""
        while (code := self._starter.read_code(self.pid, None)) is None:
            pass
        return code

    def terminate(self) -> None:
        """Ask the run to save and end."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """End the run at once."""
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class WarmStarter:
    """The process that forks runs, started with the first one and again if it has died."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._models = tempfile.TemporaryDirectory(prefix="practicum-models-")
        self._environment = {**environment, SHARED_MODELS: self._models.name}
        self._process: subprocess.Popen[bytes] | None = None
        self._codes: dict[int, int | None] = {}
        """The exit code of each process that it has started, None while it runs."""

    def open(self) -> None:
        """Start the process if it does not run; it imports while the caller continues."""
        if self._process is None:
            # -P: a file of the current folder must not replace a package. A separate session:
            # Ctrl-C in the terminal only reaches the caller, which stops the runs in order.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "practicum.cli.warm"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=self._environment,
                start_new_session=True,
                bufsize=0,
                preexec_fn=end_with_parent,
            )

    def start(self, words: Sequence[str], log: Path) -> WarmRun:
        """Start `practicum WORDS` with its output in a file.

        If the process has died, a new process is started. Raises ResourceError if that also dies.
        """
        request = {"words": list(words), "log": str(log), "folder": os.getcwd()}
        for _ in range(2):
            self.open()
            assert self._process is not None and self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
            while (message := self._read(None)) is not None:
                if "started" in message:
                    self._codes[message["started"]] = None
                    return WarmRun(self, message["started"])
        raise ResourceError(
            "the process that starts runs has died twice, perhaps for lack of memory; resume with "
            f"{spell_options(resume=True, jobs=1)}"
        )

    def read_code(self, pid: int, seconds: float | None) -> int | None:
        """Return the exit code of a run, after waiting for at most some seconds."""
        if self._codes[pid] is None:
            self._read(seconds)
        return self._codes[pid]

    def close(self) -> None:
        """End the process and the runs that it has started, and remove the shared models."""
        if self._process is not None:
            self._process.kill()
            self._forget()
        self._models.cleanup()

    def _forget(self) -> None:
        """Take note of the end of the process, with which its runs end."""
        process = self._process
        assert process is not None
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.stdout.close()
        code, self._process = process.wait(), None
        self._codes = {pid: code if ended is None else ended for pid, ended in self._codes.items()}

    def _read(self, seconds: float | None) -> dict[str, Any] | None:
        """Read a message; None if none came in time, or if the process has ended."""
        process = self._process
        if process is None or process.stdout is None:
            return None
        if not select.select([process.stdout], [], [], seconds)[0]:
            return None
        line = process.stdout.readline()
        if not line:
            self._forget()
            return None
        message = json.loads(line)
        if "ended" in message:
            self._codes[message["ended"]] = message["code"]
        return message


def end_with_parent() -> None:
    """Ask the kernel to terminate this process when its parent dies, even if the parent is
    killed."""
    if _LIBC is not None:
        _LIBC.prctl(DEATH_SIGNAL, signal.SIGTERM)


def serve() -> list[str]:
    """Fork a child for each request; returns in the children only, with the words of the run."""
    requests, answers = (
        os.fdopen(os.dup(0), "rb", buffering=0),
        os.fdopen(os.dup(1), "wb", buffering=0),
    )
    os.dup2(2, 1)
    import_all()
    # The children share the pages of imported modules, so the garbage collector must not touch them.
    gc.collect()
    gc.freeze()
    children: set[int] = set()
    while True:
        if select.select([requests], [], [], POLL_SECONDS)[0]:
            line = requests.readline()
            if not line:
                sys.exit(0)
            request = json.loads(line)
            import_learned()
            parent, pid = os.getpid(), os.fork()
            if pid == 0:
                requests.close()
                answers.close()
                _begin(request, parent)
                return list(request["words"])
            children.add(pid)
            _send(answers, {"started": pid})
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                children.remove(pid)
                _send(answers, {"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def import_all() -> None:
    """Import the modules that every run imports; the first run of a recipe reports further modules."""
    import practicum.report
    import practicum.runs.launch
    import practicum.runs.pipeline  # noqa: F401


def import_learned() -> None:
    """Import the modules that an earlier run has imported; once, and again after further runs."""
    path = Path(os.environ[SHARED_MODELS]) / LEARNED
    if path.is_file():
        names = path.read_text(encoding="utf-8").split()
        path.unlink()
        for name in names:
            # Some modules can only be imported in the order of their package.
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        gc.freeze()


def note_modules() -> None:
    """Write the names of this run's modules for the process that starts the next one."""
    packages = ("practicum", "transformers", "torch", "tokenizers", "jinja2", "safetensors")
    names = [name for name in list(sys.modules) if name.partition(".")[0] in packages]
    path = Path(os.environ[SHARED_MODELS]) / LEARNED
    temporary = path.with_name(f"{LEARNED}.{os.getpid()}")
    temporary.write_text("\n".join(names), encoding="utf-8")
    temporary.replace(path)


def _send(answers: BinaryIO, message: Mapping[str, Any]) -> None:
    answers.write(json.dumps(message).encode() + b"\n")


def _begin(request: Mapping[str, Any], parent: int) -> None:
    """Make a child behave like a new process: a session, no input, and its output in the log."""
    os.setsid()
    end_with_parent()
    if os.getppid() != parent:
        sys.exit(1)
    os.chdir(request["folder"])
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(source, target)
