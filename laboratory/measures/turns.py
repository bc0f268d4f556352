"""Runs every arm as `runs` does, then asks how much more goes wrong in held-out conversations that are twice as long.

For tasks whose `turns` say how long a conversation is, and whose shorter ones are beginnings of longer ones: a turn is wrong where
a conversation that ended with it would have no reward. Read for every run:

- `wrong_turns`: the mean number of wrong turns of a conversation, and `wrong_turns/half` that of its first half.
- `growth`: the logarithm, to base 2, of the ratio of the two: 1 where mistakes grow with the number of turns, 2 with its square.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from laboratory.measures.runs import measure_with
from laboratory.results import Results
from laboratory.study import LoadedReproduction, ReproductionScale
from practicum.errors import RecipeError
from practicum.ports import Task
from practicum.recipe import Recipe
from practicum.run_dir import read_json
from practicum.runs import open_run
from practicum.runs.assembly import build_task
from practicum.runs.console import Console
from practicum.types import Rollout


class Config(BaseModel):
    """Nothing to set: the task's own `turns` are counted."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["turns"] = "turns"


def measure(
    config: Config,
    study: LoadedReproduction,
    form: ReproductionScale,
    home: Path,
    at_once: int,
    console: Console,
) -> Results:
    """Run all arms, and count the wrong turns of their last evaluation."""
    return measure_with(count_wrong_turns, study, form, home, at_once, console)


def count_wrong_turns(folder: Path) -> dict[str, float]:
    """How many turns are wrong after the training of a finished run."""
    home, recipe = open_run(folder)
    return growth_of(
        shares_wrong(
            tasks_by_turns(recipe), read_json(home.path / "after.json")["student"]["answers"]
        )
    )


def tasks_by_turns(recipe: Recipe) -> list[Task]:
    """The recipe's task with conversations of 1, 2, ... turns; RecipeError where it has none, or an odd number."""
    turns = recipe.task.model_dump().get("turns")
    if not isinstance(turns, int) or turns < 2 or turns % 2:
        raise RecipeError(
            "measure turns: conversations are halved; take a task with an even number of `turns`, as walker"
        )
    sizes = [recipe.task.model_copy(update={"turns": size}) for size in range(1, turns + 1)]
    return [build_task(recipe.model_copy(update={"task": size})) for size in sizes]


def shares_wrong(tasks: Sequence[Task], answers: Sequence[Mapping[str, Any]]) -> list[float]:
    """The share of the answers that are wrong after 1, 2, ... turns; a conversation cut before that is wrong there."""
    return [
        1 - sum(_rewards(task, turns, answers)) / len(answers)
        for turns, task in enumerate(tasks, start=1)
    ]


def _rewards(task: Task, turns: int, answers: Sequence[Mapping[str, Any]]) -> list[float]:
    """What the first so many turns of each answer, a line each, would earn."""
    asked = {prompt.id: prompt for prompt in task.heldout_prompts()}
    replies = [(asked[answer["prompt"]], answer["text"].split("\n")[:turns]) for answer in answers]
    return [task.reward(Rollout.from_text(prompt, *lines)) or 0.0 for prompt, lines in replies]


def growth_of(shares: Sequence[float]) -> dict[str, float]:
    """What is read of the shares, one a turn; no growth where nothing went wrong in the first half."""
    whole, half = sum(shares), sum(shares[: len(shares) // 2])
    growth = {"growth": math.log2(whole / half)} if half else {}
    return {"wrong_turns": whole, "wrong_turns/half": half, **growth}
