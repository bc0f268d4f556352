"""No teacher signal, for objectives that use only rewards or given answers."""

from collections.abc import Sequence
from typing import Literal

from practicum.objective import NO_CAPABILITIES, Signal
from practicum.ports import (
    Capabilities,
    Teacher,
    TeacherConfig,
    TeacherContext,
)
from practicum.types import Rollout, TeacherSignal


class Config(TeacherConfig):
    """A teacher without settings."""

    type: Literal["none"] = "none"

    def capabilities(self) -> Capabilities:
        """Return no signal."""
        return NO_CAPABILITIES


class NoTeacher(Teacher):
    """A teacher with an empty signal for every rollout; see `practicum.ports.Teacher`."""

    @property
    def capabilities(self) -> Capabilities:
        """No signal."""
        return NO_CAPABILITIES

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """Return an empty signal for each rollout."""
        return [TeacherSignal() for _ in rollouts]


def build(config: Config, context: TeacherContext) -> Teacher:
    """Return the empty teacher, which needs nothing from the run."""
    return NoTeacher()
