"""The task's words about an answer: those of its verifier, or of its environment."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from practicum.ports import Task
from practicum.ports.gate import ask_feedback
from practicum.ports.notes import Note, NoteConfig, NoteContext, NoteMoment
from practicum.rollouts.fields import classify_outcome
from practicum.types import Rollout

NOTE = "feedback"
"""The note under which an environment says something of a conversation."""


class Config(NoteConfig):
    """About which answers the task is asked."""

    type: Literal["feedback"] = "feedback"
    filter: Literal["all", "correct", "incorrect"] = Field(
        default="all", description="about these answers only, by the verifier's reward"
    )


@dataclass(frozen=True, slots=True)
class TaskFeedback(Note):
    """See `practicum.ports.notes.Note`."""

    config: Config
    task: Task

    def write(self, rollouts: Sequence[Rollout], moment: NoteMoment) -> list[str | None]:
        """Return what the environment noted, else what the task says."""
        return [self._ask(rollout) for rollout in rollouts]

    def _ask(self, rollout: Rollout) -> str | None:
        if self.config.filter not in ("all", classify_outcome(rollout)):
            return None
        if NOTE in rollout.notes:
            return rollout.notes[NOTE]
        return ask_feedback(self.task, rollout)


def build(config: Config, context: NoteContext) -> Note:
    """Ask the run's task."""
    return TaskFeedback(config, context.task)
