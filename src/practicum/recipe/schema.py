"""The recipe: the schema of a whole run."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from practicum.core.plugins import Plugin, load_plugin
from practicum.models.config import ScorerConfig, StudentConfig
from practicum.monitors import MonitorsSection
from practicum.objective import Objective
from practicum.ports import (
    TaskConfig,
    TeacherConfig,
    walk,
)
from practicum.ports.notes import NoteConfig
from practicum.ports.scoring import ScorerSettings
from practicum.recipe.families import Family
from practicum.recipe.mistakes import validate_fields
from practicum.recipe.possible import (
    STALENESS,
    find_anchor_problems,
    find_capability_problems,
    find_context_problems,
    find_curriculum_problems,
    find_engine_problems,
    find_note_problems,
    find_scorer_problems,
    find_search_problems,
    find_segment_problems,
    find_speculation_problems,
    find_staleness_problems,
    find_truncation_problem,
)
from practicum.recipe.schedule import HELDOUT, Following, Schedule, apply_values, evaluate_schedules
from practicum.recipe.sections import (
    EvaluationConfig,
    OptimizerConfig,
    Prices,
    RolloutConfig,
    TrainConfig,
)
from practicum.rollouts import NOTE_KINDS, list_writer_problems
from practicum.rollouts.sources import function
from practicum.types import FrozenConfig

WORDS = (
    "about",
    "family",
    "paper",
    "claim",
    "differs",
    "formula",
    "reduced",
    "teacher_effect",
    "slot",
)
"""Fields that describe a recipe; they change no computation."""

ScorerName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,31}$")]

NoteName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")]

RUN_NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,79}$"


class Recipe(FrozenConfig):
    """A whole run. Unknown keys are errors; all defaults are tested values."""

    name: str = Field(
        default="run",
        pattern=RUN_NAME,
        description="name of the run folder; default: the recipe file's name",
    )
    about: str = ""
    family: Family | None = Field(
        default=None, description="family of the method, by which `practicum ls` groups recipes"
    )
    paper: str | None = Field(
        default=None, description="arXiv number or address of the reproduced paper"
    )
    claim: str | None = Field(default=None, description="the paper's result and its setting")
    differs: str | None = Field(
        default=None, description="differences between this reproduction and the paper"
    )
    formula: Literal["paper", "code", "second_hand", "ours"] | None = Field(
        default=None,
        description=(
            "source of the loss: the paper, its released code, accounts by others; "
            "ours: the paper prints no formula"
        ),
    )
    reduced: str | None = Field(
        default=None, description="parts typical of the paper that are missing here"
    )
    teacher_effect: Literal["helps", "not_shown", "harms"] | None = Field(
        default=None,
        description="measured effect of the teacher on the gain, compared with `teacher=off`",
    )
    slot: str | None = Field(
        default=None, description="place in a pipeline, such as cold_start or consolidation"
    )
    seed: int = Field(default=0, ge=0)
    base_dir: str = Field(
        default=".", description="start of relative paths; set to the recipe's folder when read"
    )
    student: StudentConfig
    backend: Plugin("backends", default="local") = Field(  # type: ignore[valid-type]
        default_factory=lambda: load_plugin("backends", "local").Config(),
        description="place of the student, and its limits: see [backends](backends.md)",
    )
    teacher: Plugin("teachers", TeacherConfig) = Field(  # type: ignore[valid-type]
        default_factory=lambda: load_plugin("teachers", "none").Config()
    )
    reference: Plugin("teachers", TeacherConfig) | None = Field(  # type: ignore[valid-type]
        default=None,
        description="a second teacher for terms with `against: reference` and targets that use it",
    )
    scorers: dict[ScorerName, Plugin("scorers", ScorerSettings)] = Field(  # type: ignore[valid-type]
        default={},
        description="judges of answers in addition to the task's verifier, by name; `objective.scorer` "
        "selects the reward: see [scorers](scorers.md)",
    )
    notes: dict[NoteName, Plugin(NOTE_KINDS, NoteConfig)] = Field(  # type: ignore[valid-type]
        default={},
        description="texts made of the rollouts between reward and score, by name, in order: see "
        "[notes](notes.md)",
    )
    task: Plugin("tasks", TaskConfig)  # type: ignore[valid-type]
    rollout: RolloutConfig = RolloutConfig()
    objective: Objective = Objective()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    monitors: MonitorsSection = Field(
        default={}, description="changed settings of monitors, by id: see [monitors](monitors.md)"
    )
    tracking: Plugin("trackers") | None = Field(  # type: ignore[valid-type]
        default=None, description="a service that also receives the metrics"
    )
    prices: Prices | None = Field(
        default=None, description="prices, to show the money that a run cost"
    )
    prompt_tokens: int = Field(
        default=2048, ge=1, description="longest prompt; longer ones are rejected and counted"
    )
    schedules: dict[str, Schedule] = Field(
        default={},
        description="numbers that change from step to step, by path; written as `linear(1, 0)`",
    )

    @model_validator(mode="after")
    def _check_combinations(self) -> "Recipe":
        problems = find_capability_problems(
            self.objective, self.teacher.capabilities(), self.teacher.type
        )
        if self.reference is not None:
            capabilities = self.reference.capabilities()
            problems += find_capability_problems(
                self.objective, capabilities, self.reference.type, "reference"
            )
        elif self.objective.reference_signal is not None:
            problems.append(
                "objective: a term needs the reference and the recipe has none; set reference: "
                "{type: self, weights: frozen} for the initial student, or another teacher"
            )
        problems += list_writer_problems(
            self.rollout.source,
            self.teacher.capabilities(),
            self.teacher.type,
            None if self.reference is None else self.reference.capabilities(),
        )
        problems += find_anchor_problems(self.objective, self.rollout.source)
        problems += find_context_problems(self.objective, self.teacher, self.teacher.capabilities())
        moving = {
            path for path, schedule in self.schedules.items() if isinstance(schedule, Following)
        }
        moving |= {path for monitor in self.monitors.values() for path in monitor.set}
        problems += find_staleness_problems(
            self.rollout, self.teacher, sorted(moving), self.reference
        )
        if STALENESS in moving | self.schedules.keys():
            problems.append(
                f"{STALENESS} is one number for the whole run; write it without a schedule"
            )
        problems += self.backend.problems(
            self.student,
            self.objective,
            self.rollout.source.mixes_tokens,
            self.rollout.max_staleness,
            self.frozen_models,
        )
        if self.student.drafter is not None and self.backend.type != "local":
            problems.append(
                f"student.drafter: backend {self.backend.type!r} trains no drafter; leave backend out"
            )
        problems += find_scorer_problems(self.objective, self.scorers, self.rollout)
        problems += find_search_problems(self.evaluation.search, self.scorers)
        problems += find_note_problems(
            self.notes, self.scorers, self.teacher, self.reference, self.rollout
        )
        problems += find_segment_problems(self.rollout)
        problems += find_curriculum_problems(self.rollout, self.train)
        problems += find_truncation_problem(self.objective, self.rollout)
        problems += find_speculation_problems(self.rollout, self.student, self.backend.type)
        problems += find_engine_problems(self.rollout, self.student, self.backend.checkpoints_here)
        evaluated = [
            path
            for path, schedule in self.schedules.items()
            if isinstance(schedule, Following) and schedule.metric.startswith(HELDOUT)
        ]
        evaluated += ["train.metric_for_best_model"] * bool(self.train.metric_for_best_model)
        if self.evaluation.every is None or self.evaluation.prompts == 0:
            problems += [
                f"{path} needs evaluations during training, and the recipe has none; set "
                f"evaluation.every: {max(1, self.train.steps // 10)}"
                + (" and evaluation.prompts: 64" if self.evaluation.prompts == 0 else "")
                for path in evaluated
            ]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def frozen_models(self) -> dict[str, ScorerConfig]:
        """The models that only score, by their places in the recipe, such as `teacher.teacher`."""
        places = {"teacher": self.teacher}
        places |= {} if self.reference is None else {"reference": self.reference}
        places |= {f"scorers.{name}": scorer for name, scorer in self.scorers.items()}
        places |= {f"notes.{name}": note for name, note in self.notes.items()}
        return {
            ".".join([place, *keys]): inside
            for place, config in places.items()
            for keys, inside in walk(config)
            if isinstance(inside, ScorerConfig)
        }

    @property
    def longest_answer(self) -> int:
        """The most new tokens that a rollout or an evaluation may have at any step."""
        lengths = dict(evaluate_schedules(self.schedules, self.train.steps))
        return max(
            self.rollout.max_new_tokens,
            self.evaluation.max_new_tokens or 0,
            *map(round, lengths.get("rollout.max_new_tokens", [])),
        )

    @property
    def longest_text(self) -> int:
        """The most tokens of a prompt with its answer."""
        return self.prompt_tokens + self.longest_answer

    def replace_numbers(self, numbers: Mapping[str, float]) -> "Recipe":
        """Return the recipe with some numbers replaced, by path.

        Raises RecipeError if the numbers make the recipe impossible.
        """
        if not numbers:
            return self
        recipe_data = resolve_recipe(self)
        apply_values(recipe_data, numbers)
        if isinstance(self.rollout.source, function.Config):
            # The text of a source does not contain the function.
            recipe_data["rollout"]["source"] = self.rollout.source
        return validate_fields(Recipe, recipe_data, self.name)


def resolve_recipe(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe with all defaults, as JSON data from which the same recipe can be read."""
    return json.loads(recipe.model_dump_json())
