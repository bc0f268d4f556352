"""A note from a fixed template, chosen by the verifier's verdict and filled in without a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, model_validator

from practicum.ports.notes import Note, NoteConfig, NoteContext, NoteMoment
from practicum.rollouts.fields import (
    classify_outcome,
    list_prompt_fields,
    list_rollout_fields,
)
from practicum.text.placeholders import fill_placeholders, list_placeholders
from practicum.types import Rollout


class Config(NoteConfig):
    """The templates, with the placeholders of a privileged teacher and earlier notes."""

    type: Literal["filled"] = "filled"
    correct: str | None = Field(default=None, description="text for correct answers; none: no note")
    incorrect: str | None = Field(
        default=None, description="text for incorrect answers; none: no note"
    )

    @model_validator(mode="after")
    def _check_texts(self) -> "Config":
        if self.correct is None and self.incorrect is None:
            raise ValueError("the note has no text; set correct, incorrect or both")
        return self


@dataclass(frozen=True, slots=True)
class FilledNote(Note):
    """See `practicum.ports.notes.Note`."""

    config: Config

    def write(self, rollouts: Sequence[Rollout], moment: NoteMoment) -> list[str | None]:
        """Return the filled text; None without a verdict or if a field is missing."""
        return [
            self._fill(rollout, fields)
            for rollout, fields in zip(rollouts, list_rollout_fields(rollouts), strict=True)
        ]

    def _fill(self, rollout: Rollout, rollout_fields: dict[str, str]) -> str | None:
        texts = {"correct": self.config.correct, "incorrect": self.config.incorrect}
        text = texts.get(classify_outcome(rollout))
        fields = {**list_prompt_fields(rollout.prompt), **rollout_fields}
        if text is None or not all(name in fields for name in list_placeholders(text)):
            return None
        return fill_placeholders(text, fields)


def build(config: Config, context: NoteContext) -> Note:
    """Build the note, which only needs its texts."""
    return FilledNote(config)
