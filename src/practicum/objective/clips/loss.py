"""Tokens with a large loss give no gradient."""

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from practicum.objective.clip_call import ClipCall, ClippedPart


class Config(ClipCall):
    """A token with a loss above `maximum` gives no gradient."""

    type: Literal["loss"] = "loss"
    part: ClassVar[ClippedPart] = "divergence"
    clips_losses: ClassVar[bool] = True
    maximum: float = Field(default=0.05, gt=0)

    def find_clipped(self, divergence: Tensor) -> Tensor:
        """Return True above the maximum."""
        return divergence > self.maximum
