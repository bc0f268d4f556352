"""A run on a Ray cluster of logical GPUs, where another user takes a GPU after a trainer was lost.

python -m backends.ray_squatter MODELS OUT
"""

import os
import sys
from pathlib import Path
from typing import Any

import ray
from toy import RecordingConsole, toy_run

from practicum.backends.ray.placement import connect


class Squatter:
    """Holds a GPU."""

    def answer(self) -> int:
        return 1


class SharingConsole(RecordingConsole):
    """Lets another user take a GPU as soon as the run reports a lost trainer."""

    squatter: Any = None

    def event(self, text: str) -> None:
        super().event(text)
        print(text, flush=True)
        if "was lost" in text:
            self.squatter = ray.remote(num_gpus=1)(Squatter).remote()
            ray.get(self.squatter.answer.remote(), timeout=60)


def main() -> None:
    """Start Ray with four GPUs: two trainers, a sampler and a teacher."""
    os.environ["PRACTICUM_FAULT"] = "rank-1.differentiated:3"
    connect(object_store_memory=100 * 2**20, num_gpus=4)
    backend = {"type": "ray", "trainers": 2, "restarts": 1}
    sizes = {"train.prompts_per_step": 12, "evaluation.prompts": 8}
    toy_run(
        Path(sys.argv[1]), Path(sys.argv[2]), sizes | {"backend": backend}, console=SharingConsole()
    )
    ray.shutdown()


if __name__ == "__main__":
    main()
