"""The arms of a comparison: recipes that differ in method and share task, held-out prompts, seeds and budget.

An arm is written `RECIPE`, `NAME=RECIPE` or `NAME=RECIPE,key=value,...`: the same recipe with three divergences is three words.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from practicum.errors import RecipeError
from practicum.monitors import MONITORS
from practicum.recipe import Recipe, load_recipe
from practicum.runs.assembly import build_task
from practicum.types import Prompt

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,39}")

UNITS = ("steps", "flops", "tokens", "seconds")
"""What a budget may be in. Seconds depend on the machine and on what else it does."""

OURS = ("seed", "name", "train.budget")
"""Keys that the comparison sets itself."""

EVALUATIONS = 8
"""How often a run is evaluated on its way, unless its recipe says."""

CHECKPOINTS = 4
"""How often a run is saved on its way, unless its recipe says."""


ENDING = tuple(name for name, monitor in MONITORS.items() if monitor.stop_condition)
"""The monitors that may end a run."""


@dataclass(frozen=True, slots=True)
class ComparisonBudget:
    """What every arm may spend, for example `Budget("flops", 1e12)`; without an amount, the steps of the recipes."""

    unit: str = "steps"
    amount: float | None = None

    @classmethod
    def parse(cls, text: str) -> "ComparisonBudget":
        """`flops=1e12`, `tokens=100000`, `seconds=60`, `steps=40` or `steps`; RecipeError for anything else."""
        unit, equals, amount = text.partition("=")
        try:
            number = float(amount) if equals else None
        except ValueError:
            number = -1.0
        if (
            unit not in UNITS
            or (number is None and unit != "steps")
            or (number is not None and not 0 < number < 1e30)
        ):
            raise RecipeError(
                f"--budget {text!r}: write flops=1e12, tokens=100000, seconds=60, steps=40, or steps"
            )
        return cls(unit, number)

    def overrides(self) -> list[str]:
        """What the budget sets in a recipe."""
        if self.amount is None:
            return []
        if self.unit == "steps":
            return [f"train.steps={round(self.amount)}"]
        return [f"train.budget={{{self.unit}: {self.amount:.1f}}}"]

    def __str__(self) -> str:
        return f"{self.amount:g} {self.unit}" if self.amount is not None else "the recipes' steps"


@dataclass(frozen=True, slots=True)
class Arm:
    """One method: its name, the recipe it comes from, and what it changes in it."""

    name: str
    source: str
    overrides: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Arm":
        """`NAME=RECIPE,key=value,...`; a comma within brackets or quotes belongs to its value."""
        head, *overrides = split(text)
        name, equals, source = head.partition("=")
        if not equals:
            name, source = Path(head).stem, head
        if not NAME.fullmatch(name) or not source:
            raise RecipeError(
                f"arm {text!r}: {name[:40]!r} cannot name it; write NAME=RECIPE,key=value with letters, digits, '.', '_' and '-'"
            )
        for override in overrides:
            if override.partition("=")[0] in OURS:
                raise RecipeError(
                    f"arm {text!r}: {override!r} is the comparison's to set; write --seeds, --budget, or NAME=RECIPE"
                )
        return cls(name, source, tuple(overrides))


def split(text: str) -> list[str]:
    """The parts between commas that stand in no bracket and no quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        depth += (letter in "([{") - (letter in ")]}") if not quote else 0
        if letter == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


@dataclass(frozen=True, slots=True)
class Design:
    """What is compared: arms by name, each with one recipe a seed, and the budget that they share."""

    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    budget: ComparisonBudget
    recipes: Mapping[str, Mapping[int, Recipe]]


def design(
    words: Sequence[str],
    seeds: int,
    budget: ComparisonBudget,
    common: Sequence[str] = (),
    first: int = 0,
    may_differ: frozenset[str] = frozenset(),
) -> Design:
    """Read the arms; RecipeError where they cannot be compared.

    `common` are overrides of every arm; an arm's own win over them. Seeds count from `first`. `may_differ` names what arms
    need not share, such as "the training prompts".
    """
    arms = tuple(Arm.parse(word) for word in words)
    names = [arm.name for arm in arms]
    twice = sorted({name for name in names if names.count(name) > 1})
    if len(arms) < 2:
        raise RecipeError(
            "one arm is nothing to compare with; write two recipes, or NAME=RECIPE,key=value for each variant"
        )
    if twice:
        raise RecipeError(f"two arms are named {twice[0]!r}; write NAME=RECIPE for each")
    if seeds < 1:
        raise RecipeError(
            f"--seeds {seeds}: at least one is needed, and three to say how much seeds differ"
        )
    numbers = tuple(range(first, first + seeds))
    recipes = {
        arm.name: {seed: recipe_of(arm, seed, budget, common) for seed in numbers} for arm in arms
    }
    found = Design(arms, numbers, budget, recipes)
    _refuse_different_ground(found, may_differ)
    return found


def recipe_of(arm: Arm, seed: int, budget: ComparisonBudget, common: Sequence[str] = ()) -> Recipe:
    """An arm's recipe for a seed, saved and evaluated on its way, on one torch thread.

    No monitor ends a run unless the recipe says so: an arm that collapses has to count, and not to be left out.
    """
    plain = load_recipe(arm.source, [*common, *arm.overrides, *budget.overrides()])
    steps, train, evaluation = plain.train.steps, plain.train, plain.evaluation
    spoken = [f"monitors.{name}=warn" for name in ENDING if name not in plain.monitors]
    return load_recipe(
        arm.source,
        [
            "train.threads=1",
            f"train.checkpoint_every={train.checkpoint_every or max(1, steps // CHECKPOINTS)}",
            f"evaluation.every={evaluation.every or max(1, steps // EVALUATIONS)}",
            *spoken,
            *common,
            *arm.overrides,
            *budget.overrides(),
            f"seed={seed}",
            f"name=seed-{seed}",
        ],
    )


def _refuse_different_ground(found: Design, may_differ: frozenset[str]) -> None:
    """RecipeError, in one line, where arms differ in what a comparison has to hold equal."""
    first, *others = found.arms
    for seed in found.seeds:
        mine = _ground(found.recipes[first.name][seed], found.budget)
        for other in others:
            theirs = _ground(found.recipes[other.name][seed], found.budget)
            for what, value in mine.items():
                if value != theirs[what] and what not in may_differ:
                    shown = (
                        ""
                        if isinstance(value, str) and len(value) == 64
                        else f" ({value} and {theirs[what]})"
                    )
                    raise RecipeError(
                        f"arms {first.name!r} and {other.name!r} differ in {what}{shown}; a comparison shares task, "
                        "evaluation and budget, so set it for all with --set, or compare other recipes"
                    )


def _ground(recipe: Recipe, budget: ComparisonBudget) -> dict[str, object]:
    """What arms have to share: the prompts, how answers are drawn from held-out ones, and the steps where they are the budget."""
    task = build_task(recipe)
    evaluation = recipe.evaluation
    if evaluation.prompts == 0 or not task.heldout_prompts():
        raise RecipeError(
            f"{recipe.base_dir}: there are no held-out prompts to compare on; write evaluation.prompts, or a task that has some"
        )
    return {
        "the held-out prompts": _digest(task.heldout_prompts()),
        "the training prompts": _digest(task.train_prompts()),
        "evaluation.prompts": evaluation.prompts,
        "evaluation.samples": evaluation.samples,
        "evaluation.temperature": evaluation.temperature,
        "the longest held-out answer": evaluation.max_new_tokens or recipe.rollout.max_new_tokens,
        "prompt_tokens": recipe.prompt_tokens,
        **({"train.steps": recipe.train.steps} if budget.unit == "steps" else {}),
    }


def _digest(prompts: Sequence[Prompt]) -> str:
    """SHA-256 of what the prompts ask and what is expected."""
    content: list[Any] = [
        [prompt.id, [[message.role, message.content] for message in prompt.messages], prompt.answer]
        for prompt in prompts
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
