"""What a run writes down at every step: metrics, rollouts, and, apart from both, seconds."""

import math
from pathlib import Path
from typing import Any

from torch import Tensor

from practicum.loop import StepResult
from practicum.run_dir import Journal, RunDir, json_number
from practicum.types import Rollout, TokenOutputs


class Records:
    """The three journals of a run, written together.

    Only `timings.jsonl` depends on the clock, so the other two come out the same however often a run is resumed.
    """

    def __init__(self, home: RunDir) -> None:
        self._metrics = Journal(home.metrics_jsonl, essential=True)
        self._rollouts = Journal(home.rollouts_jsonl, essential=False)
        self._timings = Journal(timings_jsonl(home), essential=False)

    def __enter__(self) -> "Records":
        return self

    def __exit__(self, *_: object) -> None:
        for journal in (self._metrics, self._rollouts, self._timings):
            journal.close()

    def truncate_after(self, step: int) -> None:
        """Forget the rows of later steps, which a resumed run writes again."""
        for journal in (self._metrics, self._rollouts, self._timings):
            journal.truncate_after(step)

    def write(self, result: StepResult) -> None:
        """One row of metrics, one of timings, and one a rollout."""
        seconds = {name: value for name, value in result.metrics.items() if name.startswith("seconds_")}
        numbers = {name: json_number(value) for name, value in result.metrics.items() if name not in seconds}
        self._metrics.append({"step": result.step, **numbers})
        self._timings.append({"step": result.step, **seconds})
        for rollout, output in zip(result.rollouts, result.outputs, strict=True):
            self._rollouts.append(_rollout_row(result.step, rollout, output))

    def sync(self) -> None:
        """Wait until the rows are on the disk, so that no checkpoint outlives them."""
        for journal in (self._metrics, self._rollouts, self._timings):
            journal.sync()

    def losses(self) -> list[str]:
        """What could not be written, one line a journal."""
        journals = [journal for journal in (self._rollouts, self._timings) if journal.dropped]
        return [f"{journal.dropped} rows of {journal.path.name} could not be written" for journal in journals]


def timings_jsonl(home: RunDir) -> Path:
    """Where the seconds of each phase are written."""
    return home.path / "timings.jsonl"


def _rollout_row(step: int, rollout: Rollout, output: TokenOutputs) -> dict[str, Any]:
    """One line of rollouts.jsonl; with its `teacher_logprobs` the file is a tape for the scripted teacher."""
    return {
        "step": step,
        "prompt": rollout.prompt.id,
        "sample": rollout.sample,
        "text": rollout.text,
        "reward": rollout.reward,
        "stop_reason": rollout.stop_reason,
        "prompt_tokens": list(rollout.prompt_tokens),
        "tokens": rollout.tokens.tolist(),
        "sampling_logprobs": _rounded(rollout.sampling_logprobs),
        "teacher_logprobs": _rounded(output.teacher_logprobs),
        "divergence": _rounded(output.divergence),
    }


def _rounded(values: Tensor) -> list[float | None]:
    """Six digits each, which is what float32 holds; None where a token has no number."""
    return [round(value, 6) if math.isfinite(value) else None for value in values.tolist()]
