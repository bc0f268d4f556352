"""The student's own weights score: live, frozen at the start, an average (ema), or copied now and then (periodic)."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from practicum.ports import Capabilities, Teacher, TeacherContext, WeightUpdateRule
from practicum.teachers._client import ClientTeacher


class Config(BaseModel):
    """How the teacher's weights follow the student's.

    A self-teacher with the student's own context and live weights has nothing to teach; give it privileged context.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["self"] = "self"
    weights: Literal["live", "frozen", "ema", "periodic"] = "frozen"
    rate: float = Field(
        default=0.05,
        gt=0,
        le=1,
        description="ema: the student's share at each step (SDPO 2601.20802)",
    )
    period: int = Field(
        default=50, ge=1, description="periodic: steps between copies (CRISP 2603.05433)"
    )

    def capabilities(self) -> Capabilities:
        """The student is local, so every signal is at hand."""
        return Capabilities(signals=frozenset({"sampled", "topk", "full"}))


def build(config: Config, context: TeacherContext) -> Teacher:
    """Hold the student's weights as they are now."""
    held = context.self_teacher(
        WeightUpdateRule(weights=config.weights, rate=config.rate, period=config.period)
    )
    return ClientTeacher(context.count(held), context.renderer, follows=held)
