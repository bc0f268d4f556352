"""A note with the task's feedback on an answer, from its environment or its verifier."""

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
"""The note in which an environment stores its feedback on a conversation."""


class Config(NoteConfig):
    """The selection of answers to ask the task about."""

    type: Literal["feedback"] = "feedback"
    filter: Literal["all", "correct", "incorrect"] = Field(
        default="all", description="answers to ask about, by the verifier's reward"
    )


@dataclass(frozen=True, slots=True)
class TaskFeedback(Note):
    """See `practicum.ports.notes.Note`."""

    config: Config
    task: Task

    def write(self, rollouts: Sequence[Rollout], moment: NoteMoment) -> list[str | None]:
        """Return the environment's feedback, otherwise the task's feedback."""
        return [self._ask(rollout) for rollout in rollouts]

    def _ask(self, rollout: Rollout) -> str | None:
        if self.config.filter not in ("all", classify_outcome(rollout)):
            return None
        if NOTE in rollout.notes:
            return rollout.notes[NOTE]
        return ask_feedback(self.task, rollout)


def build(config: Config, context: NoteContext) -> Note:
    """Build the note with the run's task."""
    return TaskFeedback(config, context.task)
