"""The world's answers: the environment's turns after those of the student (OpenClaw-RL 2603.10165)."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from practicum.ports.notes import Note, NoteConfig, NoteContext, NoteMoment
from practicum.types import Rollout

NOTE = "next_state"
"""The note under which an environment says what it answers to the last turn."""


class Config(NoteConfig):
    """The part of the conversation to show."""

    type: Literal["next_state"] = "next_state"
    turns: Literal["all", "last"] = Field(
        default="all", description="all turns of the environment, or its last words alone"
    )


class WorldReplies(Note):
    """See `practicum.ports.notes.Note`."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def write(self, rollouts: Sequence[Rollout], moment: NoteMoment) -> list[str | None]:
        """Return the environment's turns, one a line; None without any."""
        return [self._read(rollout) for rollout in rollouts]

    def _read(self, rollout: Rollout) -> str | None:
        texts = [turn.text for turn in rollout.turns if turn.role != "assistant"]
        # What is answered to the last turn is no turn: the student never reads it.
        texts += [rollout.notes[NOTE]] if NOTE in rollout.notes else []
        if self._config.turns == "last":
            texts = texts[-1:]
        return "\n".join(texts) if texts else None


def build(config: Config, context: NoteContext) -> Note:
    """Nothing is needed but the conversation."""
    return WorldReplies(config)
