"""A teacher's distributions at T tokens, and their comparison with the student's by a signal."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from practicum.columns import TokenColumns
from practicum.functional.divergence_entry import Divergence
from practicum.functional.dual_space import BothSpaces

EXAMPLE = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]]).log()
"""Log-probabilities of three tokens at two positions, to try parts of other packages."""


@dataclass(frozen=True, slots=True)
class TeacherDistribution(TokenColumns):
    """The signal of a teacher at T tokens.

    It is the full distribution, the candidates, the sampled token, or nothing. With `outside` the
    full distribution has one more entry, see `practicum.types.TeacherSignal`; at `unknown` tokens
    the numbers about the sampled token are meaningless. `level` added to the full distribution
    gives the raw logits. `own` has the tokens that the student lacks, if a term asks for them.
    `spaces` and the level of the student's raw logits (`student_level`) are set for signals that
    ask for them, and so are `extras` and `constants`.
    """

    full: Float[Tensor, "T V"] | None = None
    topk_ids: Int[Tensor, "T K"] | None = None
    topk_logprobs: Float[Tensor, "T K"] | None = None
    logprobs: Float[Tensor, " T"] | None = None
    outside: Int[Tensor, " M"] | None = None
    unknown: Bool[Tensor, " T"] | None = None
    level: Float[Tensor, " T"] | None = None
    own: Float[Tensor, "T U"] | None = None
    spaces: BothSpaces | None = None
    student_level: Float[Tensor, " T"] | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    shared: ClassVar[frozenset[str]] = frozenset({"outside", "constants"})

    @property
    def is_empty(self) -> bool:
        """Return True if the teacher gave no signal at these tokens."""
        answers = (self.full, self.topk_ids, self.topk_logprobs, self.logprobs)
        return all(answer is None for answer in answers)


@dataclass(frozen=True, slots=True)
class SignalComparison:
    """The student and a model at the same T tokens, with the divergence of the term.

    `student` and `teacher` have log-probabilities, `against` is the model's role in the recipe.
    """

    student: Tensor
    teacher: TeacherDistribution
    tokens: Int[Tensor, " T"]
    divergence: Divergence
    parameter: float | None = None
    against: str = "teacher"

    def contributions(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the divergence's contribution of each candidate with these log-probabilities."""
        return self.divergence.contributions(student, teacher, self.parameter)


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """K more tokens drawn from the student at each of T tokens, with both models' log-probabilities.

    `compute_advantage` computes the term's advantage from log-probabilities of student and teacher.
    """

    student: Float[Tensor, "T V"]
    teacher: Float[Tensor, "T V"]
    tokens: Int[Tensor, " T"]
    ids: Int[Tensor, "T K"]
    compute_advantage: Callable[[Tensor, Tensor], Tensor]


def check_shape(what: str, values: object, shape: tuple[int, ...]) -> None:
    """Raise ValueError if what a part computed is not a finite tensor of this shape."""
    if not isinstance(values, Tensor) or values.shape != shape:
        kind = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"{what} returns {kind} and not a tensor of shape {shape}")
    if not values.isfinite().all():
        raise ValueError(f"{what} returns a number that is not finite")
