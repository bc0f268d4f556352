"""Compare two models in both hidden-state spaces, as DSKDv2 (2504.11426) does."""

from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from practicum.objective.distribution import SignalComparison
from practicum.objective.signal_call import Full
from practicum.objective.states_signal import StatesSignal


class Config(StatesSignal):
    """The divergence in both models' spaces: student states through the teacher's head, and the reverse.

    Linear maps between the states preserve the logits of common tokens. The map to the student
    learns from there at `pace` times the student's learning rate; the map to the teacher follows
    the student's head (DSKDv2 2504.11426).
    """

    type: Literal["dual_space"] = "dual_space"
    pace: float = Field(default=1.0, ge=0)
    measures: ClassVar[bool] = True
    compares: ClassVar[bool] = True
    unshared: ClassVar[bool] = True

    @property
    def question(self) -> Full:
        """Return the full distribution, which consists of hidden states and a head."""
        return Full()

    @property
    def maps_pace(self) -> float:
        """Return the learning rate of the map to the student, relative to the student's."""
        return self.pace

    def compare(self, comparison: SignalComparison) -> Tensor:
        """Return the sum of the divergences in both spaces."""
        return compare_in_both(comparison)


def compare_in_both(comparison: SignalComparison) -> Float[Tensor, " T"]:
    """Return the sum of the divergences in both spaces, differentiable in the student and the map.

    The map to the student learns by the cross-entropy of the teacher's most likely token, which adds
    a gradient but does not change the value. The student's space counts only where the map leads
    to this token, and a position counts only if the student has it (released code of DSKDv2).
    """
    spaces = comparison.teacher.spaces
    assert spaces is not None, "a trainer with the maps reads both spaces"
    pairs = (
        (comparison.student, spaces.through_student.detach()),
        (spaces.through_teacher, spaces.teacher),
    )
    inside, outside = (comparison.contributions(*pair).sum(dim=-1) for pair in pairs)
    labels, has_label = spaces.labels.clamp(min=0), spaces.labels >= 0
    error = -spaces.through_student.gather(-1, labels[:, None])[:, 0]
    agrees = spaces.through_student.argmax(dim=-1) == spaces.labels
    outside = outside + (error - error.detach())
    return torch.where(agrees, inside, 0.0) + torch.where(has_label, outside, 0.0)
