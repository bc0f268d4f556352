"""Run a function in forks of this process that are the ranks of one group."""

import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from toy import exit_status, start_fork

PATIENCE = timedelta(seconds=60)


def run_ranks(folder: Path, count: int, work: Callable[[int], Any]) -> list[Any]:
    """Return what `work` returns in each of `count` ranks."""
    import os

    folder.mkdir(parents=True, exist_ok=True)

    def start(rank: int) -> Callable[[], None]:
        def run() -> None:
            store = dist.FileStore(str(folder / "store"), count)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=count, timeout=PATIENCE
            )
            answer = work(rank)
            (folder / f"answer-{rank}").write_bytes(pickle.dumps(answer))
            dist.barrier()
            dist.destroy_process_group()

        return run

    pids = [start_fork(start(rank), output=folder / f"output-{rank}") for rank in range(count)]
    codes = [exit_status(os.waitpid(pid, 0)[1]) for pid in pids]
    texts = [(folder / f"output-{rank}").read_text() for rank in range(count)]
    assert codes == [0] * count, "\n".join(texts)
    return [pickle.loads((folder / f"answer-{rank}").read_bytes()) for rank in range(count)]
