"""Answers from the task's rows."""

from collections.abc import Sequence
from typing import Literal

from practicum.rollouts.batch import RolloutKey
from practicum.rollouts.source import OtherWriter, SourceConfig, SourceParts
from practicum.types import Rollout


class Config(SourceConfig):
    """Imitate the task's responses, otherwise its answers: supervised distillation (GKD 2306.13649)."""

    type: Literal["dataset"] = "dataset"

    @property
    def other_writers(self) -> tuple[OtherWriter, ...]:
        """Return the dataset."""
        return ("dataset",)

    def collect(self, keys: Sequence[RolloutKey], parts: SourceParts) -> list[Rollout]:
        """Return the answers of the rows."""
        return parts.read_answers(keys, self)
