"""Processes of one run as torchrun starts them, but as forks: nothing is imported again."""

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.distributed import TCPStore
from toy import command, exit_status, start_fork

from practicum.backends.torchrun import Config, join

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Started:
    """Forks by their process ids, and the store of the launcher, which outlives them."""

    folder: Path
    pids: Sequence[int]
    store: TCPStore


def describe_place(rank: int, count: int, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets for a process."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in numbers.items()}


def start(
    folder: Path,
    recipe: Path,
    *words: str,
    env: Mapping[str, str] | None = None,
    before: Mapping[int, Work] | None = None,
) -> Started:
    """Start `practicum run` in two forks, in some of them after something else."""
    folder.mkdir(parents=True, exist_ok=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launcher = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    run = command("run", str(recipe), "--out", str(folder), *words)

    def work(rank: int) -> Work:
        def in_fork() -> None:
            (before or {}).get(rank, lambda: None)()
            run()

        return in_fork

    pids = [
        start_fork(
            work(rank),
            describe_place(rank, 2, store.port) | launcher | dict(env or {}),
            folder / f"said-{rank}",
        )
        for rank in range(2)
    ]
    return Started(folder, pids, store)


def finish(started: Started) -> list[tuple[int, str]]:
    """Return each process's exit code and output."""
    codes = [exit_status(os.waitpid(pid, 0)[1]) for pid in started.pids]
    return [
        (code, (started.folder / f"said-{rank}").read_text()) for rank, code in enumerate(codes)
    ]


@contextmanager
def join_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make this process the only rank of a run."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    for name, value in describe_place(0, 1, port).items():
        monkeypatch.setenv(name, value)
    with join(Config(trainers=1)):
        yield
