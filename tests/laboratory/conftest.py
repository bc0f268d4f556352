"""Runs of a reproduction are forks: the comparison's own tests check that it starts separate processes."""

import os
import signal
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import pytest
from toy import command, environment, exit_status, start_fork


class ForkedRun:
    """A run of a comparison in a fork of this process, which need not import anything again."""

    def __init__(self, words: list[str], log: Path):
        self.pid = start_fork(command(*words), environment(), log)
        self.code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = exit_status(status) if pid else None
        return self.code

    def wait(self) -> int:
        """Return the exit code, once it has ended."""
        if self.code is None:
            self.code = exit_status(os.waitpid(self.pid, 0)[1])
        return self.code

    def kill(self) -> None:
        """Kill the fork immediately."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class ForkingStarter:
    """A replacement of `WarmStarter`, with this process as the process that has imported everything."""

    def start(self, words: list[str], log: Path) -> ForkedRun:
        """Begin `practicum WORDS`."""
        return ForkedRun(words, log)


@pytest.fixture(autouse=True)
def fork_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a comparison fork its runs from this process."""
    for name in ("practicum.studies.compare.comparing", "laboratory.measures.pipelines"):
        monkeypatch.setattr(
            import_module(name), "open_starter", lambda: nullcontext(ForkingStarter())
        )
