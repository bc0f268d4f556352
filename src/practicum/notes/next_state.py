"""A note with the environment's replies to the student's turns (OpenClaw-RL 2603.10165)."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from practicum.ports.notes import Note, NoteConfig, NoteContext, NoteMoment
from practicum.types import Rollout

NOTE = "next_state"
"""The note in which an environment stores its reply to the last turn."""


class Config(NoteConfig):
    """The part of the conversation to show."""

    type: Literal["next_state"] = "next_state"
    turns: Literal["all", "last"] = Field(
        default="all", description="all turns of the environment, or only its last reply"
    )


class WorldReplies(Note):
    """See `practicum.ports.notes.Note`."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def write(self, rollouts: Sequence[Rollout], moment: NoteMoment) -> list[str | None]:
        """Return the environment's turns, one per line; None if it has no turn."""
        return [self._read(rollout) for rollout in rollouts]

    def _read(self, rollout: Rollout) -> str | None:
        texts = [turn.text for turn in rollout.turns if turn.role != "assistant"]
        # The reply to the last turn is stored as a note, because the student never reads it.
        texts += [rollout.notes[NOTE]] if NOTE in rollout.notes else []
        if self._config.turns == "last":
            texts = texts[-1:]
        return "\n".join(texts) if texts else None


def build(config: Config, context: NoteContext) -> Note:
    """Build the note, which only needs the conversation."""
    return WorldReplies(config)
