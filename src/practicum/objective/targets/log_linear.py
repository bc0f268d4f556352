"""A product of powers of the models' distributions."""

from typing import Literal

import torch
from torch import Tensor

from practicum import functional as F
from practicum.objective.target_call import TargetCall


class Config(TargetCall):
    """`softmax(teacher log T + student log S + reference log R)`, the student's part detached.

    Veto 2601.07155, TAID 2501.16937, G-OPD 2602.12125.
    """

    type: Literal["log_linear"] = "log_linear"
    teacher: float = 1.0
    student: float = 0.0
    reference: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Return True if all of the weight is the teacher's."""
        return (self.teacher, self.student, self.reference) == (1.0, 0.0, 0.0)

    @property
    def is_product(self) -> bool:
        """Return True."""
        return True

    @property
    def needs_reference(self) -> bool:
        """Return True if the reference has an exponent."""
        return self.reference != 0.0

    def build(
        self, teacher: Tensor, student: Tensor, reference: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the normalised product."""
        if self.is_plain:
            return teacher, None
        return F.log_linear(self._list_factors(teacher, student.detach(), reference)), None

    def combine(self, teacher: Tensor, student: Tensor, reference: Tensor | None) -> Tensor:
        """Return the sum of the log-probabilities times their exponents."""
        if self.is_plain:
            return teacher
        factors = self._list_factors(teacher, student, reference)
        return torch.stack([exponent * logprobs for exponent, logprobs in factors]).sum(dim=0)

    def _list_factors(
        self, teacher: Tensor, student: Tensor, reference: Tensor | None
    ) -> list[tuple[float, Tensor]]:
        """Return the exponents and models, without zero exponents and missing distributions."""
        pairs = ((self.teacher, teacher), (self.student, student), (self.reference, reference))
        return [
            (exponent, logprobs)
            for exponent, logprobs in pairs
            if logprobs is not None and exponent != 0.0
        ]
