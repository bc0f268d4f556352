"""A note with the share of correct student answers to the prompt in this step (CaOPD 2604.16830)."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from practicum.ports.notes import Note, NoteConfig, NoteContext, NoteMoment
from practicum.rollouts.fields import classify_outcome
from practicum.statistics import group_pairs
from practicum.types import Rollout


class Config(NoteConfig):
    """The number format of the share."""

    type: Literal["rate"] = "rate"
    digits: int = Field(default=2, ge=0, le=6, description="digits after the decimal point")


class PassRate(Note):
    """See `practicum.ports.notes.Note`."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def write(self, rollouts: Sequence[Rollout], moment: NoteMoment) -> list[str | None]:
        """Return the share for each rollout's prompt; None if no answer to it has a reward."""
        outcomes = group_pairs(
            (rollout.prompt.id, classify_outcome(rollout) == "correct")
            for rollout in rollouts
            if rollout.source == "student" and rollout.reward is not None
        )
        shares = {name: sum(right) / len(right) for name, right in outcomes.items()}
        digits = self._config.digits
        return [
            f"{shares[rollout.prompt.id]:.{digits}f}" if rollout.prompt.id in shares else None
            for rollout in rollouts
        ]


def build(config: Config, context: NoteContext) -> Note:
    """Build the note, which only needs the rewards."""
    return PassRate(config)
