"""Candidates with a large contribution give no gradient."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from practicum.objective.clip_call import ClipCall, ClippedPart


class Config(ClipCall):
    """A candidate's contribution to a token's loss is held constant if it exceeds `maximum`.
    As in OPSD's released code.

    This does not bound the effect of one candidate: see below.
    """

    type: Literal["entries"] = "entries"
    part: ClassVar[ClippedPart] = "divergence"
    clips_entries: ClassVar[bool] = True
    maximum: float = Field(default=0.05, gt=0)

    def clip_entries(self, contributions: Tensor) -> Tensor:
        """Return the contributions. Contributions above the maximum have no gradient."""
        return torch.where(contributions > self.maximum, contributions.detach(), contributions)
