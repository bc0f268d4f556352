"""The teacher's distribution, moved away from the reference."""

from typing import Literal

from pydantic import Field
from torch import Tensor

from practicum import functional as F
from practicum.objective.target_call import TargetCall


class Config(TargetCall):
    """`softmax((1 + w) log T - w log R)` with `w = scale TV(T, R) + floor` at each state.
    AlignDistil 2503.02832.

    The divergence is divided by w, so its size does not depend on the distance between teacher and
    reference.
    """

    type: Literal["contrast"] = "contrast"
    scale: float = Field(default=15.0, ge=0)
    floor: float = Field(default=0.001, gt=0)

    @property
    def needs_reference(self) -> bool:
        """Return True."""
        return True

    def build(
        self, teacher: Tensor, student: Tensor, reference: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the target and w."""
        assert reference is not None, "the term is not answered without the reference"
        return F.contrast(teacher, reference, self.scale, self.floor)
