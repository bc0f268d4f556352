"""Runs on a Ray cluster of two machines that loses the second machine in the middle of a step.

python -m backends.ray_lost_machine MODELS OUT

Both are processes of this machine, with two logical GPUs each. Three trainers, which also hold the
teacher, and a sampler take all four, so there are trainers on both.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ray._common.utils import reset_ray_address
from ray.cluster_utils import Cluster
from toy import RecordingConsole, toy_run

from practicum.backends.ray import clients
from practicum.errors import WorkerLost

SIZES = {"train.prompts_per_step": 12, "evaluation.prompts": 8, "evaluation.teacher": False}
STORE = 100 * 2**20


class Console(RecordingConsole):
    """Prints the events of a run."""

    def event(self, text: str) -> None:
        super().event(text)
        print(text, flush=True)


class Machine:
    """The second machine, and the update within which it is lost."""

    def __init__(self, cluster: Cluster) -> None:
        self.node = cluster.add_node(num_cpus=1, num_gpus=2, object_store_memory=STORE)

    def lose_in(self, update: int) -> None:
        """Kill all processes of the machine once the trainers were asked for an update."""
        wait_for, asked = clients.wait_for, [0]

        def wait(references: Any, verb: str, *settings: Any) -> None:
            asked[0] += verb == "forward_backward"
            if verb == "forward_backward" and asked[0] == update:
                self.kill()
            wait_for(references, verb, *settings)

        clients.wait_for = wait  # type: ignore[assignment]

    def kill(self) -> None:
        """End Ray's own process first, since a lost machine cannot shut down cleanly."""
        parents = [info.process.pid for infos in self.node.all_processes.values() for info in infos]
        pids = [*parents, *(pid for parent in parents for pid in find_descendants(parent))]
        killed = [pid for pid in pids if is_trainer(pid)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        print(f"killed {len(killed)} trainers of the second machine", flush=True)


def find_descendants(pid: int) -> Iterator[int]:
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield int(child)
        yield from find_descendants(int(child))


def is_trainer(pid: int) -> bool:
    return b"TrainerRank" in Path(f"/proc/{pid}/cmdline").read_bytes()


def train(out: Path, trainers: int, restarts: int, *, resume: bool = False) -> None:
    backend = {"type": "ray", "trainers": trainers, "teachers": "beside", "restarts": restarts}
    started = time.monotonic()
    try:
        toy_run(
            Path(sys.argv[1]), out, SIZES | {"backend": backend}, resume=resume, console=Console()
        )
    except WorkerLost as loss:
        print(f"exit {loss.exit_code}: {loss}", flush=True)
    print(f"took {time.monotonic() - started:.0f} s", flush=True)


def main() -> None:
    out = Path(sys.argv[2])
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "num_gpus": 2, "object_store_memory": STORE},
    )
    # Another program of this machine must not find the cluster without its address.
    reset_ray_address()
    os.environ["RAY_ADDRESS"] = cluster.address
    whole = clients.wait_for
    for place, restarts in (("resumed", 0), ("by itself", 1)):
        Machine(cluster).lose_in(3)
        train(out / place, 3, restarts)
        clients.wait_for = whole
    train(out / "resumed", 1, 0, resume=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
