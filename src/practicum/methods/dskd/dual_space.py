"""Compare two models in both hidden-state spaces, as DSKDv2 (2504.11426) does."""

from typing import ClassVar, Literal

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from practicum.objective.distribution import SignalComparison
from practicum.objective.signal_call import Full
from practicum.objective.states_signal import StatesSignal


class Config(StatesSignal):
    """The divergence in both models' spaces: student states through the teacher's head, and the reverse.

    Two linear maps between the states are initialized to preserve the logits of common tokens, and
    learn at `pace` times the student's learning rate (DSKDv2 2504.11426).
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
        """Return the learning rate of the two maps, relative to the student's."""
        return self.pace

    def compare(self, comparison: SignalComparison) -> Tensor:
        """Return the sum of the divergences in both spaces."""
        return compare_in_both(comparison)


def compare_in_both(comparison: SignalComparison) -> Float[Tensor, " T"]:
    """Return the sum of the divergences in both spaces, differentiable in the student and the maps.

    The map to the student learns by the cross-entropy of the teacher's most likely token, which adds
    a gradient but does not change the value.
    """
    spaces = comparison.teacher.spaces
    assert spaces is not None, "a trainer with the maps reads both spaces"
    pairs = (
        (comparison.student, spaces.through_student.detach()),
        (spaces.through_teacher, spaces.teacher),
    )
    parts = [comparison.contributions(*pair).sum(dim=-1) for pair in pairs]
    error = -spaces.through_student.gather(-1, spaces.labels[:, None])[:, 0]
    return parts[0] + parts[1] + (error - error.detach())
