"""A mixture of teacher and student."""

from typing import Literal

from pydantic import Field
from torch import Tensor

from practicum import functional as F
from practicum.objective.target_call import TargetCall


class Config(TargetCall):
    """`teacher * T + (1 - teacher) * S` in probability, the student's part detached."""

    type: Literal["mixture"] = "mixture"
    teacher: float = Field(default=1.0, gt=0, le=1)

    def build(
        self, teacher: Tensor, student: Tensor, reference: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the mixture."""
        return F.mixture([(self.teacher, teacher), (1.0 - self.teacher, student.detach())]), None
