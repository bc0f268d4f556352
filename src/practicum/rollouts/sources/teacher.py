"""The teacher writes every completion."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from practicum.rollouts.batch import RolloutKey
from practicum.rollouts.source import OtherWriter, SourceConfig, SourceParts
from practicum.types import Rollout


class Config(SourceConfig):
    """The teacher writes, in its own context: sequence-level distillation (SeqKD 1606.07947).

    `temperature` is the teacher's sampling temperature, by default the temperature of the rollouts.
    At 0 the teacher decodes greedily. Above 1 it makes and corrects mistakes, like demonstrations
    with noise (DART 1703.09327), while its unmodified scores of each token remain the labels.
    """

    type: Literal["teacher"] = "teacher"
    temperature: float | None = Field(default=None, ge=0)

    @property
    def other_writers(self) -> tuple[OtherWriter, ...]:
        """Return the teacher."""
        return ("teacher",)

    def count_teacher_answers(self, n: int) -> float:
        """Return `n`: the teacher writes every answer."""
        return n

    def collect(self, keys: Sequence[RolloutKey], parts: SourceParts) -> list[Rollout]:
        """Return the teacher's completions or conversations."""
        return parts.sample_teacher(keys, self, self.temperature)
