"""Run every arm as `runs` does, and measure what the rounding of its teacher costs.

The reading of a run with a quantized teacher, on the student's answers before training:

- `rounding`: KL(all bits || fewer bits) in nats per token, by the doctor's check P21. As in P21,
  the teacher reads only the prompt, without the additions of a wrapping teacher.
"""

from pathlib import Path
from typing import Literal

from laboratory.measures.runs import measure_with
from laboratory.results import Results
from laboratory.study import ReproductionJob
from practicum.core.notes import hide_notes
from practicum.runs import open_run
from practicum.studies.doctor import doctor
from practicum.types import FrozenConfig

PROMPTS = 16


class Config(FrozenConfig):
    """No settings."""

    type: Literal["bits"] = "bits"


def measure(config: Config, job: ReproductionJob) -> Results:
    """Run all arms, and let the doctor measure the cost of each quantized teacher."""
    return measure_with(read_rounding, job)


def read_rounding(folder: Path) -> dict[str, float]:
    """Return the reading of a finished run; it is empty if the teacher is not quantized."""
    _, recipe = open_run(folder)
    with hide_notes():
        results = doctor(recipe, prompts=PROMPTS, samples=1, progress=False).results
    cost = next(result.outcome.value for result in results if result.check.id == "P21")
    return {} if cost is None else {"rounding": cost.mean}
