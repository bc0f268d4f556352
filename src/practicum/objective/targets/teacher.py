"""The teacher's distribution, at a temperature."""

from typing import Literal

from pydantic import Field
from torch import Tensor

from practicum import functional as F
from practicum.objective.target_call import TargetCall


class Config(TargetCall):
    """The teacher's distribution at a temperature (0: its most likely token as a label)."""

    type: Literal["teacher"] = "teacher"
    temperature: float = Field(default=1.0, ge=0)

    @property
    def is_plain(self) -> bool:
        """Return True at temperature 1."""
        return self.temperature == 1.0

    @property
    def is_label(self) -> bool:
        """Return True at temperature 0."""
        return self.temperature == 0.0

    def build(
        self, teacher: Tensor, student: Tensor, reference: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the teacher's distribution at the temperature."""
        if self.is_label:
            return F.greedy(teacher), None
        return (teacher if self.is_plain else F.temper(teacher, self.temperature)), None
