"""The arms of a comparison: recipes with different methods and the same task, held-out prompts,
seeds
and budget.

An arm is written `RECIPE`, `NAME=RECIPE` or `NAME=RECIPE,key=value,...`: one recipe with three
divergences is three words.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from practicum.core.options import spell_options
from practicum.errors import RecipeError
from practicum.monitors import MONITORS
from practicum.pictures import list_ids
from practicum.recipe import Recipe, load_recipe
from practicum.runs.opening import build_task
from practicum.types import Prompt

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,39}")

UNITS = ("steps", "flops", "tokens", "seconds")
"""The units of a budget. Seconds depend on the machine and its other work."""

RESERVED_KEYS = ("seed", "name", "train.budget")
"""Recipe keys that only the comparison sets."""

EVALUATIONS = 8
"""Evaluations during a run, unless its recipe sets them."""

CHECKPOINTS = 4
"""Checkpoints during a run, unless its recipe sets them."""

STOPPING_MONITORS = tuple(name for name, monitor in MONITORS.items() if monitor.can_end_run)
"""The monitors that may stop a run."""


@dataclass(frozen=True, slots=True)
class ComparisonBudget:
    """The most that a run may spend, for example `ComparisonBudget("flops", 1e12)`.

    Without an amount, the steps of the recipes.
    """

    unit: str = "steps"
    amount: float | None = None

    @classmethod
    def parse(cls, text: str) -> "ComparisonBudget":
        """Parse `flops=1e12`, `tokens=100000`, `seconds=60`, `steps=40` or `steps`.

        Raises RecipeError for anything else.
        """
        unit, equals, amount = text.partition("=")
        try:
            number = float(amount) if equals else None
        except ValueError:
            number = -1.0
        is_amount = unit == "steps" if number is None else 0 < number < 1e30
        if unit not in UNITS or not is_amount:
            raise RecipeError(
                f"{spell_options(budget=text)}: "
                "use flops=1e12, tokens=100000, seconds=60, steps=40, or steps"
            )
        return cls(unit, number)

    def build_overrides(self) -> list[str]:
        """Return the overrides that give a recipe this budget."""
        if self.amount is None:
            return []
        if self.unit == "steps":
            return [f"train.steps={round(self.amount)}"]
        return [f"train.budget={{{self.unit}: {self.amount:.1f}}}"]

    def __str__(self) -> str:
        return f"{self.amount:g} {self.unit}" if self.amount is not None else "the recipes' steps"


@dataclass(frozen=True, slots=True)
class ComparisonSettings:
    """The settings of a comparison.

    `seeds` seeds count from `first`; `at_once` runs execute in parallel; `out` is the folder;
    `common` are overrides of every arm's recipe; `may_differ` names settings that arms need not
    share;
    `overwrite` replaces an earlier comparison in the folder.
    """

    seeds: int = 3
    budget: ComparisonBudget = field(default_factory=ComparisonBudget)
    max_parallel_runs: int = 2
    out: Path = Path("runs/compare")
    resume: bool = False
    common: tuple[str, ...] = ()
    first_seed: int = 0
    may_differ: frozenset[str] = frozenset()
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class Arm:
    """One method: its name, the recipe it comes from, and overrides of it."""

    name: str
    source: str
    overrides: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Arm":
        """Parse `NAME=RECIPE,key=value,...`; a comma in brackets or quotes belongs to its value."""
        head, *overrides = split_words(text)
        name, equals, source = head.partition("=")
        if not equals:
            name, source = Path(head).stem, head
        if not NAME.fullmatch(name) or not source:
            raise RecipeError(
                f"arm {text!r}: {name[:40]!r} cannot name it; "
                "use NAME=RECIPE,key=value with letters, digits, '.', '_' and '-'"
            )
        for override in overrides:
            if override.partition("=")[0] in RESERVED_KEYS:
                raise RecipeError(
                    f"arm {text!r}: {override!r} is the comparison's to set; "
                    f"use {spell_options(seeds=3, budget='steps=40')}, or NAME=RECIPE"
                )
        return cls(name, source, tuple(overrides))


def split_words(text: str) -> list[str]:
    """Split a text at each comma that is not in brackets or quotes."""
    words, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        if not quote:
            depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0 and not quote:
            words.append("")
        else:
            words[-1] += letter
    return words


@dataclass(frozen=True, slots=True)
class Design:
    """A comparison: arms, seeds, the shared budget, and the recipe of each arm for each seed."""

    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    budget: ComparisonBudget
    recipes: Mapping[str, Mapping[int, Recipe]]

    def list_equal_arms(self) -> list[str]:
        """Return a line for each pair of arms that are one recipe under two names."""
        seed = self.seeds[0]
        return [
            f"{first.name} and {second.name} are the same recipe, so their runs will also "
            f"be the same; was {second.name} meant to differ? use {second.name}={second.source},KEY=VALUE"
            for first, second in combinations(self.arms, 2)
            if self.recipes[first.name][seed] == self.recipes[second.name][seed]
        ]


def read_design(words: Sequence[str], settings: ComparisonSettings) -> Design:
    """Read the arms; RecipeError if they cannot be compared."""
    arms = tuple(Arm.parse(word) for word in words)
    if len(arms) < 2:
        raise RecipeError(
            "a comparison needs at least two arms; "
            "give two recipes, or NAME=RECIPE,key=value for each variant"
        )
    counts = Counter(arm.name for arm in arms)
    repeated = min((name for name, count in counts.items() if count > 1), default=None)
    if repeated is not None:
        raise RecipeError(f"two arms are named {repeated!r}; use NAME=RECIPE for each")
    if settings.seeds < 1:
        raise RecipeError(
            f"{spell_options(seeds=settings.seeds)}: at least one is needed, "
            "and three to measure the variation between seeds"
        )
    seeds = tuple(range(settings.first_seed, settings.first_seed + settings.seeds))
    recipes = {
        arm.name: {seed: build_recipe(arm, seed, settings) for seed in seeds} for arm in arms
    }
    design = Design(arms, seeds, settings.budget, recipes)
    _require_equal_controls(design, settings.may_differ)
    return design


def build_recipe(arm: Arm, seed: int, settings: ComparisonSettings) -> Recipe:
    """Return an arm's recipe for a seed, saved and evaluated during the run, on one torch thread.

    No monitor stops a run unless the recipe asks for it.
    """
    # Later overrides win: an arm's over the common ones, and the budget's over both.
    overrides = [*settings.common, *arm.overrides, *settings.budget.build_overrides()]
    plain = load_recipe(arm.source, overrides)
    steps, train, evaluation = plain.train.steps, plain.train, plain.evaluation
    # A collapsed run counts with its collapsed result. Without it, the remaining seeds would make
    # the method look better than it is.
    monitors = [f"monitors.{name}=warn" for name in STOPPING_MONITORS if name not in plain.monitors]
    return load_recipe(
        arm.source,
        [
            # One thread per run: runs share the machine, and seconds compare only if all have the
            # same.
            "train.threads=1",
            f"train.checkpoint_every={train.checkpoint_every or max(1, steps // CHECKPOINTS)}",
            f"evaluation.every={evaluation.every or max(1, steps // EVALUATIONS)}",
            *monitors,
            *overrides,
            f"seed={seed}",
            f"name=seed-{seed}",
        ],
    )


def _require_equal_controls(design: Design, may_differ: frozenset[str]) -> None:
    """Raise RecipeError if arms differ in a setting that a comparison keeps equal."""
    first, *other_arms = design.arms
    for seed in design.seeds:
        controls = _collect_controls(design.recipes[first.name][seed], design.budget)
        for arm in other_arms:
            arm_controls = _collect_controls(design.recipes[arm.name][seed], design.budget)
            for name, control in controls.items():
                if control == arm_controls[name] or name in may_differ:
                    continue
                is_digest = isinstance(control, str) and len(control) == 64
                values = "" if is_digest else f" ({control} and {arm_controls[name]})"
                raise RecipeError(
                    f"arms {first.name!r} and {arm.name!r} differ in {name}{values}; "
                    "a comparison shares task, evaluation and budget, "
                    f"so set it for all with {spell_options(set=['KEY=VALUE'])}, "
                    "or compare other recipes"
                )


def _collect_controls(recipe: Recipe, budget: ComparisonBudget) -> dict[str, object]:
    """Return the settings that arms must share, by name; prompts as a digest.

    The prompts, the settings of the held-out evaluation, and the steps if they are the budget.
    """
    task = build_task(recipe)
    evaluation = recipe.evaluation
    if evaluation.prompts == 0 or not task.heldout_prompts():
        raise RecipeError(
            f"{recipe.base_dir}: there are no held-out prompts to compare on; "
            "set evaluation.prompts, or a task that has some"
        )
    return {
        "the held-out prompts": _hash_prompts(task.heldout_prompts()),
        "the training prompts": _hash_prompts(task.train_prompts()),
        "evaluation.prompts": evaluation.prompts,
        "evaluation.samples": evaluation.samples,
        "evaluation.temperature": evaluation.temperature,
        "the longest held-out answer": evaluation.max_new_tokens or recipe.rollout.max_new_tokens,
        "prompt_tokens": recipe.prompt_tokens,
        **({"train.steps": recipe.train.steps} if budget.unit == "steps" else {}),
    }


def _hash_prompts(prompts: Sequence[Prompt]) -> str:
    """Return the SHA-256 of the prompts' messages and expected answers, in hexadecimal."""
    content: list[Any] = [
        [
            prompt.id,
            [message.to_json() for message in prompt.messages],
            prompt.answer,
            *list_ids(prompt.messages),
        ]
        for prompt in prompts
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
