"""The entry of a divergence: its term, its facts, and the quantities that follow from them."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.functional.precision import finite, precise
from practicum.functional.table import Table

Room = Callable[[], Tensor]
"""A function that returns a matrix of the pair's shape to write into; its content is undefined."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """The parameter of a family of divergences: its name, default, range and meaning."""

    name: str
    default: float
    low: float
    high: float
    meaning: str
    low_inclusive: bool = True
    high_inclusive: bool = True

    @property
    def interval(self) -> str:
        """The range in mathematical notation, for example `(0, 1]`."""
        opening, closing = "[" if self.low_inclusive else "(", "]" if self.high_inclusive else ")"
        return f"{opening}{self.low:g}, {self.high:g}{closing}"

    def check(self, number: float) -> float:
        """Return the value; raise ValueError if it is outside the range."""
        above = number >= self.low if self.low_inclusive else number > self.low
        below = number <= self.high if self.high_inclusive else number < self.high
        if not (above and below and math.isfinite(number)):
            raise ValueError(
                f"{self.name} must be in {self.interval} ({self.meaning}), got {number:g}"
            )
        return number


@dataclass(frozen=True, slots=True)
class DistributionPair:
    """Two distributions as log-probabilities [*s, K] and as probabilities, so that each exponential
    is computed once.
    """

    student: Tensor
    student_probs: Tensor
    teacher: Tensor
    teacher_probs: Tensor


@dataclass(frozen=True, slots=True)
class Divergence:
    """One divergence: its term, and the facts that decide where it can be used.

    - pointwise: a candidate's contribution depends on that candidate only, so that sampled tokens
      suffice
    - f_divergence: it is E_S[f(r)] for a convex f, so that merging candidates never raises it
    - exact_gradient: no factor is held constant, so that autograd gives the gradient of the value
    - zero_at_equality: the value is zero at equality
    - slope: `slope(pair, parameter, out, room)` writes the derivative in log S at each candidate
      into `out`, up to a multiple of S, which cancels in the gradient of the logits, and returns
      the value; `room()` gives one more matrix to write into; None leaves it to autograd
    """

    name: str
    term: Callable[[Tensor, Tensor, float], Tensor]
    parameter: Parameter | None
    paper: str
    summary: str
    pointwise: bool = True
    f_divergence: bool = True
    exact_gradient: bool = True
    zero_at_equality: bool = True
    slope: Callable[["DistributionPair", float, Tensor, Room], Tensor] | None = None

    @property
    def defaults(self) -> dict[str, float]:
        """The parameter with its default, or nothing without a parameter."""
        return {} if self.parameter is None else {self.parameter.name: self.parameter.default}

    def resolve(self, parameter: float | None) -> float:
        """Return the checked parameter, or the default if None; 0 if the entry has no parameter."""
        if self.parameter is None:
            if parameter is not None:
                raise ValueError(f"{self.name} takes no parameter, got {parameter:g}")
            return 0.0
        try:
            return self.parameter.check(self.parameter.default if parameter is None else parameter)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    def contributions(
        self,
        student: Float[Tensor, "*s K"],
        teacher: Float[Tensor, "*s K"],
        parameter: float | None = None,
    ) -> Float[Tensor, "*s K"]:
        """Return the contribution of each candidate."""
        return self.term(finite(student), finite(teacher), self.resolve(parameter))

    def value(
        self,
        student: Float[Tensor, "*s K"],
        teacher: Float[Tensor, "*s K"],
        parameter: float | None = None,
    ) -> Float[Tensor, "*s"]:
        """Return the divergence at each position, differentiable in the student."""
        return self.contributions(student, teacher, parameter).sum(dim=-1)

    def advantage(
        self,
        student_logprob: Float[Tensor, "*s"],
        teacher_logprob: Float[Tensor, "*s"],
        parameter: float | None = None,
    ) -> Float[Tensor, "*s"]:
        """Return the detached advantage A of tokens sampled from the student.

        E_S[-A * grad log S] is the divergence's gradient. A is minus `tail_coefficient`, shifted by
        a constant to be 0 where student and teacher agree. For an f-divergence it is
        `r f'(r) - f(r)` (OPD+, arXiv 2606.01039): log r for reverse KL, r - 1 for forward KL.
        """
        certain = torch.zeros(1, dtype=torch.float64, device=student_logprob.device)
        shift = self._unit_gradient(certain, certain, parameter)
        return _cast(
            shift - self._unit_gradient(student_logprob, teacher_logprob, parameter),
            student_logprob,
        )

    def tail_coefficient(
        self,
        student_logprob: Float[Tensor, "*s"],
        teacher_logprob: Float[Tensor, "*s"],
        parameter: float | None = None,
    ) -> Float[Tensor, "*s"]:
        """Return the detached coefficient c of a token sampled from S.

        E_S[c * grad log S] over any set of tokens is the gradient of that set's contributions; so a
        sampled tail completes an exact head. No constant may be dropped here, because the
        probabilities of the tail do not sum to 1: reverse KL gives log S - log T + 1.
        """
        return _cast(
            self._unit_gradient(student_logprob, teacher_logprob, parameter), student_logprob
        )

    def _unit_gradient(
        self, student_logprob: Tensor, teacher_logprob: Tensor, parameter: float | None
    ) -> Tensor:
        """Return `(d term / d log S) / S` in float64, which keeps digits down to log S = -700."""
        if not self.pointwise:
            names = ", ".join(name for name, entry in DIVERGENCES.items() if entry.pointwise)
            raise ValueError(
                f"{self.name} depends on the whole distribution and has no sampled-token form;"
                f" use one of {names}"
            )
        resolved = self.resolve(parameter)
        # Callers may hold tensors of inference mode, which autograd refuses: clone them outside it.
        # Below log S = -700 the quotient would be 0 / 0 even in float64.
        with torch.inference_mode(False), torch.enable_grad():
            student = student_logprob.detach().double().clone().clamp(min=-700.0).requires_grad_()
            teacher = finite(teacher_logprob.detach().double().clone())
            (gradient,) = torch.autograd.grad(self.term(student, teacher, resolved).sum(), student)
        return gradient / student.detach().exp()


DIVERGENCES = Table(Divergence, "divergences")
"""Every divergence by name."""


def _cast(values: Tensor, like: Tensor) -> Tensor:
    """Return the values in the dtype of computations with `like`, clamped to that dtype's range."""
    dtype = precise(like).dtype
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)
