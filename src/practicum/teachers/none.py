"""No teacher signal, for objectives that use only rewards or given answers."""

from typing import Literal

from practicum.objective import NO_CAPABILITIES
from practicum.ports import Capabilities, Teacher, TeacherConfig, TeacherContext
from practicum.teaching.client import SilentTeacher


class Config(TeacherConfig):
    """A teacher without settings."""

    type: Literal["none"] = "none"

    def capabilities(self) -> Capabilities:
        """Return no signal."""
        return NO_CAPABILITIES


class NoTeacher(SilentTeacher):
    """A teacher with an empty signal for every rollout; see `practicum.ports.Teacher`."""

    @property
    def capabilities(self) -> Capabilities:
        """No signal."""
        return NO_CAPABILITIES


def build(config: Config, context: TeacherContext) -> Teacher:
    """Return the empty teacher, which needs nothing from the run."""
    return NoTeacher()
