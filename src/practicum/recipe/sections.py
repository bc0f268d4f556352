"""The sections of a recipe that are not plug-ins, as typed data."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from practicum.core.plugins import Plugin
from practicum.models.config import FinishedStage, SpeculationConfig
from practicum.models.starting_values import CAREFUL
from practicum.ports import AdamParams
from practicum.rollouts import HeldoutSearch, SourceChoice
from practicum.rollouts.sources import student
from practicum.types import FrozenConfig, Pace, SamplingParams

BY_STUDENT = "by the student: see [settings](settings.md)"

Decay = Annotated[float, Field(ge=0, lt=1)]


class EpisodesConfig(FrozenConfig):
    """The pace at which the conversations of a step call their environments."""

    at_once: int = Field(
        default=1, ge=1, description="environments that run in parallel; 1: one after another"
    )
    seconds: float | None = Field(
        default=None,
        gt=0,
        description="total time limit of a conversation's environment; past it, the conversation "
        "ends with `timeout`",
    )
    together: bool = Field(
        default=True,
        description="each turn waits for the slowest environment, for the same bytes; false: a "
        "conversation continues as soon as its own environment has answered",
    )

    @model_validator(mode="after")
    def _check_threads(self) -> "EpisodesConfig":
        if not self.together and self.at_once == 1:
            raise ValueError(
                "together: false needs environments that answer side by side; set at_once: 16"
            )
        return self

    def build_pace(self) -> Pace:
        """Return the settings as a value for a step."""
        return Pace(self.at_once, self.seconds, self.together)


class RolloutConfig(FrozenConfig):
    """The source of the rollouts and the settings of sampling."""

    source: SourceChoice = student.Config()
    replay_size: int = Field(
        default=1000, ge=1, description="rollouts from which `mix(other=replay)` chooses"
    )
    engine: Plugin("practicum.engines") | None = Field(  # type: ignore[valid-type]
        default=None,
        description="program that samples with the student's weights: `vllm`, or `local` for the "
        "backend itself; none: `auto` on a machine with a GPU and vLLM, see [engines](engines.md)",
    )
    draft: SpeculationConfig | None = Field(
        default=None,
        description="drafter for sampling in fewer calls of the student: see "
        "[drafters](drafters.md#sampling-with-a-drafter)",
    )
    n: int = Field(default=1, ge=1, description="completions per prompt")
    max_new_tokens: int = Field(default=CAREFUL.max_new_tokens, ge=1, description=BY_STUDENT)
    segment_tokens: int | None = Field(
        default=None,
        ge=1,
        description="most new tokens of an answer in one step; a longer answer continues in a "
        "later step: see [rollouts](rollouts.md#segments); none: every answer ends in its step",
    )
    max_turns: int | None = Field(
        default=None,
        ge=1,
        description="turns of the student in a conversation; none: until the task ends it",
    )
    episodes: EpisodesConfig = Field(
        default=EpisodesConfig(),
        description="how conversations call their environments: see [rollouts](rollouts.md#pace)",
    )
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    max_staleness: int = Field(
        default=0,
        ge=0,
        description=(
            "updates by which rollouts are sampled ahead of training: "
            "see [asynchronous](asynchronous.md)"
        ),
    )

    @model_validator(mode="after")
    def _check_source(self) -> "RolloutConfig":
        if problems := self.source.list_problems(self.n, self.max_new_tokens):
            raise ValueError("; ".join(problems))
        return self

    def build_sampling_params(self, stop_ids: frozenset[int]) -> SamplingParams:
        """Return these settings with the student's stop tokens."""
        return SamplingParams(
            self.max_new_tokens,
            self.temperature,
            self.top_p,
            self.top_k,
            stop_ids,
            max_turns=self.max_turns,
            pace=self.episodes.build_pace(),
        )


class OptimizerConfig(FrozenConfig):
    """The settings of AdamW and the schedule of its learning rate."""

    learning_rate: float = Field(default=CAREFUL.learning_rate, gt=0, lt=10, description=BY_STUDENT)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(
        default=0, ge=0, description="by the student, if the recipe sets no learning rate either"
    )
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)

    def build_adam_params(self, step: int, steps: int) -> AdamParams:
        """Return the settings of one step, counted from 1."""
        return AdamParams(
            learning_rate=self.learning_rate * self._compute_factor(step, steps),
            betas=self.betas,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
        )

    def _compute_factor(self, step: int, steps: int) -> float:
        if step <= self.warmup_steps:
            return step / self.warmup_steps
        # It stays below 1, since a rate of 0 at the last step would waste that step.
        progress = (step - self.warmup_steps - 1) / max(steps - self.warmup_steps, 1)
        if self.schedule == "linear":
            return 1.0 - progress
        return 0.5 * (1.0 + math.cos(math.pi * progress)) if self.schedule == "cosine" else 1.0


class Budget(FrozenConfig):
    """Limits of a run: it ends before a step that would exceed one, but not before the first."""

    flops: float | None = Field(
        default=None, gt=0, description="FLOPs of all phases: see [plan](plan.md)"
    )
    tokens: float | None = Field(default=None, gt=0, description="supervised tokens")
    seconds: float | None = Field(
        default=None,
        gt=0,
        description="seconds spent in steps; the only limit that reads the clock",
    )

    def find_exceeded(self, spending: Mapping[str, float], step: Mapping[str, float]) -> str | None:
        """Return the first limit that another `step` after `spending` would exceed, or None."""
        for name, limit in self:
            if limit is not None and spending[name] + step[name] > limit:
                return name
        return None


class Prices(FrozenConfig):
    """Prices for the summary and the report of a run; items without a price are left out."""

    currency: str = Field(default="USD", max_length=12)
    machine_hour: float | None = Field(
        default=None, ge=0, description="price of one hour of the training machine"
    )
    million_sampled_tokens: float | None = Field(
        default=None, ge=0, description="price of a million tokens that teachers generate"
    )
    million_scored_tokens: float | None = Field(
        default=None,
        ge=0,
        description="price of a million tokens that teachers score, prompts included",
    )

    def compute_money(self, cost: Mapping[str, Any], seconds: float) -> dict[str, float]:
        """Return the price of each item of a run; `cost` comes from `costs.summarize_costs`."""
        sampled = cost["sample"]["teacher_tokens"] / 1e6
        scored = (cost["score"]["tokens"] + cost["score"]["prompt_tokens"]) / 1e6
        items = {
            "machine": (self.machine_hour, seconds / 3600),
            "sampled tokens": (self.million_sampled_tokens, sampled),
            "scored tokens": (self.million_scored_tokens, scored),
        }
        return {
            name: price * amount for name, (price, amount) in items.items() if price is not None
        }


Share = Annotated[float, Field(ge=0, le=1)]
Power = Annotated[float, Field(ge=0, le=10)]


class CurriculumConfig(FrozenConfig):
    """The prompts to learn from, by their pass rate: the share of right answers."""

    run: FinishedStage | None = Field(
        default=None,
        description="the stage whose answers count, as `{model: {stage: NAME}}`, or the folder of a "
        "run; none: the student's answers in this run, up to the newest step",
    )
    pass_rate: tuple[Share, Share] = Field(
        default=(0.0, 1.0), description="lowest and highest pass rate of a prompt"
    )
    rise: float | None = Field(
        default=None,
        description="most by which the pass rate of the second half of the answers exceeds that of "
        "the first half; none: any",
    )
    powers: tuple[Power, Power] = Field(
        default=(0.0, 0.0),
        description="(a, b): a prompt with pass rate p is drawn in proportion to p^a (1 - p)^b; "
        "(0, 0): each prompt once per epoch",
    )

    @model_validator(mode="after")
    def _check_range(self) -> "CurriculumConfig":
        low, high = self.pass_rate
        if low > high:
            raise ValueError(f"pass_rate: {low} to {high} is no range; set for example [0, 0.9]")
        if (low, high, self.rise, *self.powers) == (0.0, 1.0, None, 0.0, 0.0):
            raise ValueError("it keeps every prompt; set pass_rate, rise or powers")
        return self


class TrainConfig(FrozenConfig):
    """The length of a run, the size of a step, and checkpoints."""

    steps: int = Field(default=CAREFUL.steps, ge=1, description=BY_STUDENT)
    prompts_per_step: int = Field(default=CAREFUL.prompts_per_step, ge=1, description=BY_STUDENT)
    updates_per_step: int = Field(
        default=1, ge=1, description="optimizer steps (mini-batches) per training step"
    )
    epochs: int = Field(default=1, ge=1, description="passes over the rollouts of a step")
    curriculum: CurriculumConfig | None = Field(
        default=None,
        description="prompts by their pass rate: see [curricula](pipelines.md#prompts-of-a-stage)",
    )
    checkpoint_every: int | None = Field(
        default=None,
        ge=1,
        description="steps between checkpoints; none: ten minutes; the last step is always saved",
    )
    keep_checkpoints: int = Field(default=2, ge=1)
    metric_for_best_model: Literal["accuracy", "reverse_kl"] | None = Field(
        default=None,
        description="held-out measure; the step with its best value is kept as the checkpoint `RUN@best`; "
        "needs `evaluation.every`",
    )
    save_in_background: bool = Field(
        default=False,
        description="write checkpoints from a copy in the machine's memory while training continues",
    )
    threads: int | None = Field(
        default=None, ge=1, description="torch threads; none: torch's default"
    )
    budget: Budget | None = Field(default=None, description="limits that can end the run earlier")


class EvaluationConfig(FrozenConfig):
    """The evaluation on held-out prompts."""

    prompts: int = Field(
        default=64, ge=0, description="largest number of held-out prompts; 0: no evaluation"
    )
    samples: int = Field(default=1, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    max_new_tokens: int | None = Field(default=None, ge=1, description="none: as in rollout")
    max_turns: int | None = Field(
        default=None,
        ge=1,
        description="turns in a conversation; 1: only the first answer; none: until the "
        "task ends it",
    )
    teacher: bool = Field(default=True, description="also evaluate the teacher, in its own context")
    every: int | None = Field(
        default=None,
        ge=1,
        description="steps between evaluations during training; none: only before and after",
    )
    search: HeldoutSearch | None = Field(
        default=None,
        description="`{source, n: 8, temperature: 1}`: a source that also answers each prompt with the "
        "best of `n` answers: see [evaluation](evaluation.md#search); none: only plain answers",
    )
