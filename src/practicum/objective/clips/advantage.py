"""Advantages are bounded."""

from typing import ClassVar, Literal

from pydantic import model_validator
from torch import Tensor

from practicum.functional.advantages import clip
from practicum.objective.clip_call import ClipCall, ClippedPart


class Config(ClipCall):
    """The teacher's advantage is clipped to [low, high], which contains 0.
    A clipped token keeps its gradient (REOPOLD 2603.11137).

    Of a sum over candidates each one's advantage is clipped (OpenClaw-RL 2603.10165).
    """

    type: Literal["advantage"] = "advantage"
    part: ClassVar[ClippedPart] = "advantage"
    low: float = -5.0
    high: float = 5.0

    def bound(self, advantage: Tensor) -> Tensor:
        """Return the advantages within the bounds."""
        return clip(advantage, self.low, self.high)

    @model_validator(mode="after")
    def _check_order(self) -> "Config":
        if not self.low <= 0.0 <= self.high:
            raise ValueError(
                f"clip 'advantage' needs low <= 0 <= high, got {self.low} and {self.high}: "
                "a band without 0 changes the sign of some advantages"
            )
        return self
