"""Run every arm as `runs` does, and measure how mistakes grow with the length of a conversation.

The task has `turns`, the length of a conversation, and its short conversations are prefixes of
long conversations. A turn is wrong if a conversation that ended with it would have no reward. The readings
of a run, on held-out conversations:

- `wrong_turns`: mean number of wrong turns; `wrong_turns/half`: the same in the first half.
- `growth`: base-2 logarithm of their ratio: 1 if mistakes grow with the number of turns, 2 if they
  grow with its square.
- `lost`: share of wrong turns among the turns after a conversation's first wrong turn.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from laboratory.measures.runs import measure_with
from laboratory.results import Results
from laboratory.study import ReproductionJob
from practicum.errors import RecipeError
from practicum.ports import Task
from practicum.recipe import Recipe
from practicum.run_dir import read_json
from practicum.runs import open_run
from practicum.runs.opening import build_task
from practicum.types import FrozenConfig, Rollout


class Config(FrozenConfig):
    """No settings: the task defines the number of turns."""

    type: Literal["turns"] = "turns"


def measure(config: Config, job: ReproductionJob) -> Results:
    """Run all arms, and count the wrong turns of their last evaluation."""
    return measure_with(count_wrong_turns, job)


def count_wrong_turns(folder: Path) -> dict[str, float]:
    """Return the readings of a finished run."""
    run_dir, recipe = open_run(folder)
    answers = read_json(run_dir.path / "after.json")["student"]["answers"]
    wrong = find_wrong_turns(build_tasks(recipe), answers)
    return compute_growth(compute_wrong_shares(wrong)) | compute_lost_share(wrong)


def build_tasks(recipe: Recipe) -> list[Task]:
    """Return the recipe's task with conversations of 1, 2, ... turns.

    Raises RecipeError if the task has no `turns`, or an odd number.
    """
    turns = recipe.task.model_dump().get("turns")
    if not isinstance(turns, int) or turns < 2 or turns % 2:
        raise RecipeError(
            "measure turns: conversations are halved; use a task with an even number of `turns`, "
            "such as walker"
        )
    configs = [recipe.task.model_copy(update={"turns": count}) for count in range(1, turns + 1)]
    return [build_task(recipe.model_copy(update={"task": config})) for config in configs]


def find_wrong_turns(
    tasks: Sequence[Task], answers: Sequence[Mapping[str, Any]]
) -> list[list[bool]]:
    """Return for each answer whether it is wrong after 1, 2, ... turns.

    A conversation that ended earlier is wrong at the missing turns.
    """
    by_turn = [
        [reward < 1 for reward in _compute_rewards(task, turns, answers)]
        for turns, task in enumerate(tasks, start=1)
    ]
    return [list(turns) for turns in zip(*by_turn, strict=True)]


def compute_wrong_shares(wrong: Sequence[Sequence[bool]]) -> list[float]:
    """Return the share of answers that are wrong after 1, 2, ... turns."""
    return [sum(column) / len(wrong) for column in zip(*wrong, strict=True)]


def compute_lost_share(wrong: Sequence[Sequence[bool]]) -> dict[str, float]:
    """Return the share of wrong turns after the first wrong turn; empty if no turn follows it."""
    later = [turn for turns in wrong if True in turns for turn in turns[turns.index(True) + 1 :]]
    return {"lost": sum(later) / len(later)} if later else {}


def _compute_rewards(task: Task, turns: int, answers: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the reward of the first turns of each answer; a turn is a line."""
    prompts = {prompt.id: prompt for prompt in task.heldout_prompts()}
    rewards = []
    for answer in answers:
        lines = answer["text"].split("\n")[:turns]
        rewards.append(task.reward(Rollout.from_text(prompts[answer["prompt"]], *lines)) or 0.0)
    return rewards


def compute_growth(shares: Sequence[float]) -> dict[str, float]:
    """Return the readings from the share of each turn; no growth without an early mistake."""
    total, half = sum(shares), sum(shares[: len(shares) // 2])
    growth = {"growth": math.log2(total / half)} if half else {}
    return {"wrong_turns": total, "wrong_turns/half": half, **growth}
