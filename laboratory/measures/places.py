"""Run every arm as `runs` does, and measure accuracy and divergence by place in the answer.

The task is `laboratory.counting`. The readings of a run:

- `accuracy/part_1` to `accuracy/part_4`: share of right numbers in each quarter of the held-out answers.
- `divergence_at_0` to `divergence_at_256`: the reverse KL of the last step, in nats per token, at tokens 0 to 3, 4 to 15, 16 to 63,
  64 to 255 and from 256 on, of the answers that the arm trains on.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from laboratory.counting import find_right
from laboratory.measures.runs import measure_with
from laboratory.results import Results
from laboratory.study import ReproductionJob
from practicum.run_dir import read_json, read_rows
from practicum.types import FrozenConfig

PARTS = 4
PREFIX = "reverse_kl_at_"


class Config(FrozenConfig):
    """No settings."""

    type: Literal["places"] = "places"


def measure(config: Config, job: ReproductionJob) -> Results:
    """Run all arms, and read their last evaluation and their last step."""
    return measure_with(read_places, job)


def read_places(folder: Path) -> dict[str, float]:
    """Return the readings of a finished run."""
    answers = read_json(folder / "after.json")["student"]["answers"]
    shares = average_parts([find_right(answer["text"], answer["expected"]) for answer in answers])
    last = list(read_rows(folder / "metrics.jsonl"))[-1]
    divergences = {
        f"divergence_at_{name.removeprefix(PREFIX)}": reading
        for name, reading in last.items()
        if name.startswith(PREFIX)
    }
    return shares | divergences


def average_parts(answers: Sequence[Sequence[bool]]) -> dict[str, float]:
    """Return the mean share of each quarter of the answers, each of at least four numbers."""
    sums = [0.0] * PARTS
    for right in answers:
        for part in range(PARTS):
            numbers = right[part * len(right) // PARTS : (part + 1) * len(right) // PARTS]
            sums[part] += sum(numbers) / len(numbers)
    return {f"accuracy/part_{part + 1}": total / len(answers) for part, total in enumerate(sums)}
