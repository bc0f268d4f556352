"""The student's own weights as the teacher: live, frozen, averaged (ema) or copied (periodic)."""

from typing import Literal

from pydantic import Field

from practicum.ports import (
    Capabilities,
    Teacher,
    TeacherConfig,
    TeacherContext,
    WeightUpdateRule,
)
from practicum.teaching.client import ClientTeacher


class Config(TeacherConfig):
    """The rule by which the teacher's weights follow the student's.

    A self-teacher with live weights and the student's own context teaches nothing: give it
    privileged context.
    """

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
        """Return every signal: the student is local."""
        return Capabilities(signals=frozenset({"sampled", "topk", "full"}), raw_logits=True)


def build(config: Config, context: TeacherContext) -> Teacher:
    """Keep the student's current weights."""
    client = context.load_self(
        WeightUpdateRule(weights=config.weights, rate=config.rate, period=config.period)
    )
    return ClientTeacher(context.count_client(client), context.renderer, follower=client)
