"""Nobody scores: for objectives that learn from rewards or from given answers alone."""

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from practicum.objective import Signal
from practicum.ports import Capabilities, Teacher, TeacherContext
from practicum.types import Rollout, TeacherSignal

NO_CAPABILITIES = Capabilities(
    signals=frozenset(), supports=frozenset(), writes=False, follows_student=False
)
"""What silence can answer."""


class Config(BaseModel):
    """Nothing to set."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["none"] = "none"

    def capabilities(self) -> Capabilities:
        """No signal at all."""
        return NO_CAPABILITIES


class NoTeacher(Teacher):
    """Says nothing about any rollout; see `practicum.ports.Teacher`."""

    @property
    def capabilities(self) -> Capabilities:
        """No signal at all."""
        return NO_CAPABILITIES

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """One empty signal a rollout."""
        return [TeacherSignal() for _ in rollouts]


def build(config: Config, context: TeacherContext) -> Teacher:
    """Silence needs nothing of a run."""
    return NoTeacher()
