"""Run every arm as `runs` does, and measure how its last evaluation calls the task's tools.

The readings of a run, on held-out conversations:

- `called`: share of conversations with a call that has a result.
- `calls_answered`: share of the calls that have a result; the remaining calls cannot be parsed, name
  no tool, or do not fit it.
- `calls_too_many`: mean number of calls beyond the first. The task needs one, as `calculator` does.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from laboratory.measures.runs import measure_with
from laboratory.results import Results
from laboratory.study import ReproductionJob
from practicum.run_dir import read_json
from practicum.types import FrozenConfig


class Config(FrozenConfig):
    """No settings."""

    type: Literal["calls"] = "calls"


def measure(config: Config, job: ReproductionJob) -> Results:
    """Run all arms, and count the calls of their last evaluation."""
    return measure_with(read_calls, job)


def read_calls(folder: Path) -> dict[str, float]:
    """Return the readings of a finished run."""
    answers = read_json(folder / "after.json")["student"]["answers"]
    return count_calls([answer["calls"] for answer in answers])


def count_calls(conversations: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return the readings of the outcomes of each conversation's calls."""
    outcomes = [outcome for calls in conversations for outcome in calls]
    called = sum("answered" in calls for calls in conversations) / len(conversations)
    surplus = sum(max(len(calls) - 1, 0) for calls in conversations) / len(conversations)
    # Without calls, the share of answered calls is undefined.
    share = {"calls_answered": outcomes.count("answered") / len(outcomes)} if outcomes else {}
    return {"called": called, "calls_too_many": surplus, **share}
