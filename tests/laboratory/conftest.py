"""Runs of a reproduction are forks: that a comparison starts processes of their own is held by its own tests."""

import os
import signal
import subprocess
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from toy import command, exit_status, start_fork


class ForkedRun:
    """What `subprocess.Popen` is of `python -P -m practicum WORDS`, in a fork that need not import anything again."""

    def __init__(self, words: list[str], *, stdout: IO[bytes], env: dict[str, str], **_: Any):
        assert words[1:4] == ["-P", "-m", "practicum"]
        self.pid = start_fork(command(*words[4:]), env, Path(stdout.name))
        self.code: int | None = None

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = exit_status(status) if pid else None
        return self.code

    def wait(self) -> int:
        """The exit code, once it has ended."""
        if self.code is None:
            self.code = exit_status(os.waitpid(self.pid, 0)[1])
        return self.code

    def kill(self) -> None:
        """End it at once."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


@pytest.fixture(autouse=True)
def fork_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a comparison fork its runs; all else that starts a process is as it was."""
    module = import_module("practicum.studies.compare.run_jobs")
    starts = SimpleNamespace(**{**vars(subprocess), "Popen": ForkedRun})
    monkeypatch.setattr(module, "subprocess", starts)
