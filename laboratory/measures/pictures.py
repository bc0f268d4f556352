"""Run every arm as `runs` does, and measure how much the student's answers depend on the picture.

The reading of a run, on its held-out answers:

- `reliance`: mean log-probability per token of the trained student with the picture, minus its
  log-probability without: its visual advantage, as VA-OPD (2605.21924) measures a teacher's.
"""

from pathlib import Path
from typing import Literal

import torch

from laboratory.measures.runs import measure_with
from laboratory.results import Results
from laboratory.study import ReproductionJob
from practicum.objective import Sampled
from practicum.rows.pictures import show_pictures
from practicum.run_dir import read_json, write_json
from practicum.runs import open_run, restore_components
from practicum.training.evaluation import answer_heldout
from practicum.types import FrozenConfig, ScoreRequest


class Config(FrozenConfig):
    """No settings."""

    type: Literal["pictures"] = "pictures"


def measure(config: Config, job: ReproductionJob) -> Results:
    """Run all arms, and score their answers without the pictures."""
    return measure_with(measure_reliance, job)


def measure_reliance(folder: Path) -> dict[str, float]:
    """Return the reading of a finished run; it is measured once."""
    path = folder / "reliance.json"
    if not path.is_file():
        built = restore_components(*open_run(folder))
        assert built.evaluation is not None, "a study of pictures has held-out prompts"
        sampler, renderer = built.parts.sampler, built.parts.renderer
        answers = answer_heldout(sampler, renderer, built.parts.task, built.evaluation)
        requests = [
            ScoreRequest(
                renderer.render(show_pictures(answer.prompt, which).messages),
                tuple(answer.tokens.tolist()),
            )
            for which in (None, "none")
            for answer in answers
        ]
        logprobs = [signal.logprobs for signal in sampler.score(requests, Sampled())]
        with_pictures, without = (
            torch.cat([part for part in half if part is not None])
            for half in (logprobs[: len(answers)], logprobs[len(answers) :])
        )
        write_json(path, {"reliance": (with_pictures - without).mean().item()})
    return read_json(path)
