"""The recipe: the whole run as typed data."""

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from practicum.core.plugins import Plugin, module_of
from practicum.models.config import StudentConfig
from practicum.monitors import MonitorsSection
from practicum.objective import Objective
from practicum.recipe.mistakes import validated
from practicum.recipe.possible import (
    STALENESS,
    capability_problems,
    staleness_problems,
    truncation_problem,
)
from practicum.recipe.schedule import Adaptive, Schedule, apply_values, compute_value
from practicum.recipe.sections import (
    EvaluationConfig,
    OptimizerConfig,
    Prices,
    RolloutConfig,
    TrainConfig,
)
from practicum.rollouts import source_problems

WORDS = ("about", "paper", "claim", "differs", "formula", "reduced", "slot")
"""What a recipe says about itself, which changes nothing that is computed."""

RUN_NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,79}$"


class Recipe(BaseModel):
    """A whole run. Unknown keys are errors; every default is a vetted value."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str = Field(
        default="run",
        pattern=RUN_NAME,
        description="the run folder's name; the recipe file's by default",
    )
    about: str = ""
    paper: str | None = Field(
        default=None, description="the arXiv number or the address of what it reproduces"
    )
    claim: str | None = Field(
        default=None, description="what the paper reports, and in which setting"
    )
    differs: str | None = Field(
        default=None, description="what this reproduction leaves out or does otherwise"
    )
    formula: Literal["paper", "code", "second_hand", "ours"] | None = Field(
        default=None,
        description="where the loss was read: the paper, its released code, others' accounts; ours: it prints none",
    )
    reduced: str | None = Field(
        default=None, description="what is characteristic of the paper and missing here"
    )
    slot: str | None = Field(
        default=None, description="its place in a pipeline, such as cold_start or consolidation"
    )
    seed: int = Field(default=0, ge=0)
    base_dir: str = Field(
        default=".", description="where relative paths start; set to the recipe's folder when read"
    )
    student: StudentConfig
    backend: Plugin("backends", "local") = Field(  # type: ignore[valid-type]
        default_factory=lambda: module_of("backends", "local").Config(),
        description="where the student is, and how much is held there at once: see [backends](backends.md)",
    )
    teacher: Plugin("teachers") = Field(  # type: ignore[valid-type]
        default_factory=lambda: module_of("teachers", "none").Config()
    )
    reference: Plugin("teachers") | None = Field(  # type: ignore[valid-type]
        default=None,
        description="a second teacher, for terms with `against: reference` and targets that name it",
    )
    task: Plugin("tasks")  # type: ignore[valid-type]
    rollout: RolloutConfig = RolloutConfig()
    objective: Objective = Objective()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    monitors: MonitorsSection = Field(
        default={},
        description="what is done differently about a monitor, by its id: see [monitors](monitors.md)",
    )
    tracking: Plugin("trackers") | None = Field(  # type: ignore[valid-type]
        default=None, description="a service that metrics go to besides the run folder"
    )
    prices: Prices | None = Field(
        default=None, description="what things cost, to show money beside the rest"
    )
    prompt_tokens: int = Field(
        default=2048, ge=1, description="longer prompts are rejected, and counted"
    )
    schedules: dict[str, Schedule] = Field(
        default={},
        description="numbers that change from step to step, by their place; written there as `linear(1, 0)`",
    )

    @model_validator(mode="after")
    def _possible(self) -> "Recipe":
        problems = capability_problems(
            self.objective, self.teacher.capabilities(), self.teacher.type
        )
        if self.reference is not None:
            capabilities = self.reference.capabilities()
            problems += capability_problems(
                self.objective, capabilities, self.reference.type, "reference"
            )
        elif self.objective.reference_signal is not None:
            problems.append(
                "objective: a term asks the reference and there is none; write reference: {type: self, weights: frozen} for the "
                "student as it began, or another teacher"
            )
        problems += source_problems(
            self.rollout.source, self.teacher.capabilities(), self.teacher.type
        )
        moving = {
            path for path, schedule in self.schedules.items() if isinstance(schedule, Adaptive)
        }
        moving |= {path for monitor in self.monitors.values() for path in monitor.set}
        problems += staleness_problems(self.rollout, self.teacher, sorted(moving))
        if STALENESS in moving | self.schedules.keys():
            problems.append(
                f"{STALENESS} is one number for the whole run; write it without a schedule"
            )
        problems += self.backend.problems(
            self.student, self.objective, self.rollout.source.type, self.rollout.max_staleness
        )
        problem = truncation_problem(self.objective, self.rollout)
        if problems or problem:
            raise ValueError("; ".join([*problems, *([problem] if problem else [])]))
        return self

    @property
    def longest_answer(self) -> int:
        """The largest number of new tokens that a rollout or an evaluation may have at any step."""
        schedule = self.schedules.get("rollout.max_new_tokens")
        numbers = (
            []
            if schedule is None
            else [
                compute_value(schedule, step, self.train.steps)
                for step in range(1, self.train.steps + 1)
            ]
        )
        return max(
            self.rollout.max_new_tokens, self.evaluation.max_new_tokens or 0, *map(round, numbers)
        )

    def at(self, numbers: Mapping[str, float]) -> "Recipe":
        """The recipe with some of its numbers set; RecipeError where that makes it impossible."""
        if not numbers:
            return self
        data = resolved(self)
        apply_values(data, numbers)
        return validated(Recipe, data, self.name)


def resolved(recipe: Recipe) -> dict[str, Any]:
    """The recipe with every default filled in, as JSON data that reads back to the same recipe."""
    return json.loads(recipe.model_dump_json())
