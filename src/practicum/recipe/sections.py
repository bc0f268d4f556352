"""The parts of a recipe that are not plugins, as typed data."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from practicum.ports import AdamParams
from practicum.rollouts import Prefix, SourceChoice, StudentSource
from practicum.types import SamplingParams

Decay = Annotated[float, Field(ge=0, lt=1)]


class RolloutConfig(BaseModel):
    """Whose tokens are learned from, and how they are drawn."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    source: SourceChoice = StudentSource()
    replay_size: int = Field(
        default=1000, ge=1, description="rollouts that `mix(other=replay)` chooses from"
    )
    n: int = Field(default=1, ge=1, description="completions of each prompt")
    max_new_tokens: int = Field(default=256, ge=1)
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    max_staleness: int = Field(
        default=0,
        ge=0,
        description="updates by which rollouts are drawn ahead of being learned from: see [asynchronous](asynchronous.md)",
    )

    @model_validator(mode="after")
    def _leaves_room(self) -> "RolloutConfig":
        if isinstance(self.source, Prefix) and self.source.length >= self.max_new_tokens:
            raise ValueError(
                f"a prefix of {self.source.length} tokens leaves the student none of its max_new_tokens, "
                f"{self.max_new_tokens}; write a shorter one, or raise max_new_tokens"
            )
        return self

    def sampling(self, stop_ids: frozenset[int]) -> SamplingParams:
        """These numbers with the student's stop tokens."""
        return SamplingParams(
            self.max_new_tokens, self.temperature, self.top_p, self.top_k, stop_ids
        )


class OptimizerConfig(BaseModel):
    """AdamW and the course of its learning rate."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    learning_rate: float = Field(default=1e-5, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)

    def adam(self, step: int, steps: int) -> AdamParams:
        """The parameters of one step, counted from 1."""
        return AdamParams(
            learning_rate=self.learning_rate * self._factor(step, steps),
            betas=self.betas,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
        )

    def _factor(self, step: int, steps: int) -> float:
        if step <= self.warmup_steps:
            return step / self.warmup_steps
        progress = (step - self.warmup_steps - 1) / max(steps - self.warmup_steps, 1)
        if self.schedule == "linear":
            return 1.0 - progress
        return 0.5 * (1.0 + math.cos(math.pi * progress)) if self.schedule == "cosine" else 1.0


class Budget(BaseModel):
    """What a run may spend: it ends before a step that would exceed any of these, but not before its first."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    flops: float | None = Field(
        default=None, gt=0, description="operations of all phases: see [plan](plan.md)"
    )
    tokens: float | None = Field(default=None, gt=0, description="tokens learned from")
    seconds: float | None = Field(
        default=None, gt=0, description="of the steps alone; the one that a clock decides"
    )

    def exceeded(self, spent: Mapping[str, float], step: Mapping[str, float]) -> str | None:
        """The name of the first that another `step` would exceed, after what was `spent`, or None."""
        limits = {name: limit for name, limit in self if limit is not None}
        return next(
            (name for name, limit in limits.items() if spent[name] + step[name] > limit), None
        )


class Prices(BaseModel):
    """What things cost, for the end of a run and its report; nothing is priced unless it is written here."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    currency: str = Field(default="USD", max_length=12)
    machine_hour: float | None = Field(
        default=None, ge=0, description="an hour of the machine that trains"
    )
    million_sampled_tokens: float | None = Field(
        default=None, ge=0, description="a million tokens that teachers write"
    )
    million_scored_tokens: float | None = Field(
        default=None,
        ge=0,
        description="a million tokens that teachers read to score, prompts included",
    )

    def money(self, cost: Mapping[str, Any], seconds: float) -> dict[str, float]:
        """What a run's `cost` (see `practicum.costs.cost_summary`) and its seconds come to, item by item."""
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


class TrainConfig(BaseModel):
    """How long, how much at once, how often saved."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    steps: int = Field(ge=1)
    prompts_per_step: int = Field(default=16, ge=1)
    updates_per_step: int = Field(
        default=1, ge=1, description="optimizer steps that a step's rollouts are split into"
    )
    epochs: int = Field(
        default=1, ge=1, description="how many times a step's rollouts are learned from"
    )
    checkpoint_every: int | None = Field(
        default=None, ge=1, description="steps; the last step is always saved"
    )
    keep_checkpoints: int = Field(default=2, ge=1)
    threads: int | None = Field(
        default=None, ge=1, description="torch threads; none: torch's own choice"
    )
    budget: Budget | None = Field(default=None, description="ends the run before `steps` are done")


class EvaluationConfig(BaseModel):
    """What is measured on held-out prompts before and after."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    prompts: int = Field(
        default=64, ge=0, description="at most this many held-out prompts; 0: no evaluation"
    )
    samples: int = Field(default=1, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    max_new_tokens: int | None = Field(default=None, ge=1, description="none: as in rollout")
    teacher: bool = Field(
        default=True, description="also let the teacher answer, in its own context"
    )
    every: int | None = Field(
        default=None, ge=1, description="steps between evaluations while training; none: no others"
    )
