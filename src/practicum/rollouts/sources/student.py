"""The student writes every completion."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from practicum.rollouts.batch import RolloutKey
from practicum.rollouts.source import SourceConfig, SourceParts
from practicum.types import Rollout


class Config(SourceConfig):
    """The student writes every completion: on-policy distillation itself (GKD 2306.13649)."""

    type: Literal["student"] = "student"
    writes_segments: ClassVar[bool] = True

    def collect(self, keys: Sequence[RolloutKey], parts: SourceParts) -> list[Rollout]:
        """Return the student's completions; with segments, only the finished completions."""
        if parts.writers.segments is not None:
            return parts.writers.segments.collect(parts.sampler, parts.writers.student)
        return parts.sample_student(keys)
