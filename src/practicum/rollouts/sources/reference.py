"""The reference writes every completion."""

from collections.abc import Sequence
from typing import Literal

from practicum.rollouts.batch import RolloutKey
from practicum.rollouts.source import OtherWriter, SourceConfig, SourceParts
from practicum.types import Rollout


class Config(SourceConfig):
    """The reference writes, from the student's prompt: answers to pair (DPO 2305.18290)."""

    type: Literal["reference"] = "reference"

    @property
    def other_writers(self) -> tuple[OtherWriter, ...]:
        """Return the reference."""
        return ("reference",)

    def collect(self, keys: Sequence[RolloutKey], parts: SourceParts) -> list[Rollout]:
        """Return the reference's completions or conversations."""
        return parts.sample_reference(keys, self)
