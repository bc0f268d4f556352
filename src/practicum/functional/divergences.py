"""Every divergence, as one pointwise function of two log-probabilities.

A *term* gives the contribution of each candidate to the divergence; their sum over the last axis is its value. From the
term alone follow the pathwise loss, the advantage of a sampled token, and the coefficient of a sampled tail, so a new
divergence is one block: its parameter and slope where it has one, its term with its facts, and its public function.

Student first, log-probabilities in, one number per position out. S and T are the probabilities, r = T / S. Terms are
given finite log-probabilities, with -inf replaced by `IMPOSSIBLE`, and may be given sub-distributions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.functional.precision import IMPOSSIBLE, finite, precise
from practicum.functional.table import Table

# fmt: off
__all__ = [
    "DIVERGENCES", "TEACHER_FLOOR", "Divergence", "Parameter", "adaptive_kl", "alpha", "ce", "density_power", "forward_kl", "jsd",
    "jsd_normalized", "mixed_kl", "mse", "reverse_kl", "skew_forward_kl", "skew_reverse_kl", "todi", "tvd",
]
# fmt: on

TEACHER_FLOOR = -50.0
"""Reverse KL takes teacher log-probabilities below this to be this, or the student's own where that is lower still.

Without a floor one token that the teacher holds impossible makes the value infinite; with it, a token to which both
give less than the floor costs nothing, so equality still means zero.
"""

SMALLEST = 1e-38
"""Stands for 0 under a logarithm."""

HEAD_MASS = 0.5
"""Teacher mass of the head of `adaptive_kl`, the value of its paper."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """The one number of a family: its name, default and range, and what it means."""

    name: str
    default: float
    low: float
    high: float
    meaning: str
    low_inclusive: bool = True
    high_inclusive: bool = True

    @property
    def interval(self) -> str:
        """The range as mathematics writes it, for example `(0, 1]`."""
        left, right = "[" if self.low_inclusive else "(", "]" if self.high_inclusive else ")"
        return f"{left}{self.low:g}, {self.high:g}{right}"

    def check(self, value: float) -> float:
        """The value, if it is in the range."""
        above = value >= self.low if self.low_inclusive else value > self.low
        below = value <= self.high if self.high_inclusive else value < self.high
        if not (above and below and math.isfinite(value)):
            raise ValueError(
                f"{self.name} must be in {self.interval} ({self.meaning}), got {value:g}"
            )
        return value


@dataclass(frozen=True, slots=True)
class DistributionPair:
    """Two distributions as log-probabilities [*s, K] and as probabilities, so that no exponential is taken twice."""

    student: Tensor
    student_probs: Tensor
    teacher: Tensor
    teacher_probs: Tensor


@dataclass(frozen=True, slots=True)
class Divergence:
    """One divergence: its term, and the facts about it that decide where it can be used.

    - pointwise: a candidate's contribution depends on that candidate only, so that sampled tokens suffice
    - f_divergence: it is E_S[f(r)] for a convex f, so that merging candidates never raises it
    - exact_gradient: no factor is held constant, so that autograd gives the gradient of the value
    - zero_at_equality: the value is zero at equality
    - slope: `slope(pair, parameter, out, scratch)` writes its derivative in log S at each candidate into `out`, up to a
      multiple of S, which no gradient of logits sees, and returns its value; None where it is left to autograd
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
    slope: Callable[["DistributionPair", float, Tensor, Tensor], Tensor] | None = None

    @property
    def defaults(self) -> dict[str, float]:
        """The parameter with its default, where it has one."""
        return {} if self.parameter is None else {self.parameter.name: self.parameter.default}

    def resolve(self, parameter: float | None) -> float:
        """The parameter to use: the given one if it is allowed, else the default (0 where there is none)."""
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
        """The contribution of each candidate."""
        return self.term(finite(student), finite(teacher), self.resolve(parameter))

    def value(
        self,
        student: Float[Tensor, "*s K"],
        teacher: Float[Tensor, "*s K"],
        parameter: float | None = None,
    ) -> Float[Tensor, "*s"]:
        """The divergence at each position, differentiable in the student."""
        return self.contributions(student, teacher, parameter).sum(dim=-1)

    def advantage(
        self,
        student_logprob: Float[Tensor, "*s"],
        teacher_logprob: Float[Tensor, "*s"],
        parameter: float | None = None,
    ) -> Float[Tensor, "*s"]:
        """The detached advantage A of tokens drawn from the student: E_S[-A * grad log S] is the divergence's gradient.

        It is minus `tail_coefficient`, shifted by a constant to be 0 where student and teacher agree. For an
        f-divergence it is `r f'(r) - f(r)` (OPD+, arXiv 2606.01039): log r for reverse KL, r - 1 for forward KL.
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
        """The detached coefficient c of a token drawn from S: E_S[c * grad log S] over any set of tokens is the
        gradient of that set's contributions, which is how a sampled tail completes an exact head.

        No constant may be dropped here, because the tail alone does not sum to 1: reverse KL gives log S - log T + 1.
        """
        return _cast(
            self._unit_gradient(student_logprob, teacher_logprob, parameter), student_logprob
        )

    def _unit_gradient(
        self, student_logprob: Tensor, teacher_logprob: Tensor, parameter: float | None
    ) -> Tensor:
        """`(d term / d log S) / S` in float64, where the quotient keeps its digits down to log S = -700."""
        if not self.pointwise:
            names = ", ".join(name for name, entry in DIVERGENCES.items() if entry.pointwise)
            raise ValueError(
                f"{self.name} depends on the whole distribution and has no sampled-token form; use one of {names}"
            )
        value = self.resolve(parameter)
        with torch.inference_mode(False), torch.enable_grad():
            student = student_logprob.detach().double().clone().clamp(min=-700.0).requires_grad_()
            teacher = finite(teacher_logprob.detach().double().clone())
            (gradient,) = torch.autograd.grad(self.term(student, teacher, value).sum(), student)
        return gradient / student.detach().exp()


DIVERGENCES = Table(Divergence)
"""Every divergence by name."""


def _cast(values: Tensor, like: Tensor) -> Tensor:
    """The values in the dtype that `like` is computed with, held within that dtype's range."""
    dtype = precise(like).dtype
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)


def floored(student: Tensor, teacher: Tensor, out: Tensor | None = None) -> Tensor:
    """The teacher's log-probabilities, not below `TEACHER_FLOOR` except where the student's are."""
    floor = torch.clamp(student.detach(), max=TEACHER_FLOOR, out=out)
    return torch.maximum(teacher, floor, out=out)


def _log_mix(log_ratio: Tensor, weight: float) -> Tensor:
    """`log(1 - weight + weight * exp(log_ratio))`, exact to rounding near 0 as well as far from it."""
    growth = weight * torch.expm1(log_ratio.clamp(max=20.0))
    near = torch.log1p(growth.clamp(min=-0.5))
    rest = torch.full_like(log_ratio, math.log1p(-weight) if weight < 1.0 else -math.inf)
    far = torch.logaddexp(rest, log_ratio + math.log(weight))
    return torch.where((log_ratio < 20.0) & (growth > -0.5), near, far)


def _forward_kl_slope(pair: DistributionPair, _: float, slope: Tensor, scratch: Tensor) -> Tensor:
    value = torch.sub(pair.teacher, pair.student, out=scratch).mul_(pair.teacher_probs).sum(dim=-1)
    torch.neg(pair.teacher_probs, out=slope)
    return value


@DIVERGENCES.enter(
    None, "1503.02531", "KL(T || S), covers the teacher's modes", slope=_forward_kl_slope
)
def _forward_kl(student: Tensor, teacher: Tensor, _: float) -> Tensor:
    return teacher.exp() * (teacher - student)


def forward_kl(
    student: Float[Tensor, "*s V"], teacher: Float[Tensor, "*s V"]
) -> Float[Tensor, "*s"]:
    """KL(T || S) = sum T (log T - log S), the classic distillation loss (arXiv 1503.02531).

    Gradient in the student's logits: S - T. Unbounded where the student misses what the teacher does.
    """
    return DIVERGENCES["forward_kl"].value(student, teacher)


def _reverse_kl_slope(pair: DistributionPair, _: float, slope: Tensor, scratch: Tensor) -> Tensor:
    torch.sub(pair.student, floored(pair.student, pair.teacher, out=scratch), out=slope)
    return slope.mul_(pair.student_probs).sum(dim=-1)


@DIVERGENCES.enter(
    None, "2306.08543", "KL(S || T), seeks the teacher's modes", slope=_reverse_kl_slope
)
def _reverse_kl(student: Tensor, teacher: Tensor, _: float) -> Tensor:
    return student.exp() * (student - floored(student, teacher))


def reverse_kl(
    student: Float[Tensor, "*s V"], teacher: Float[Tensor, "*s V"]
) -> Float[Tensor, "*s"]:
    """KL(S || T) = sum S (log S - log T), with `TEACHER_FLOOR` under log T (MiniLLM, arXiv 2306.08543).

    Gradient in the student's logits: S (log S - log T - KL).
    """
    return DIVERGENCES["reverse_kl"].value(student, teacher)


BETA = Parameter("beta", 0.5, 0.0, 1.0, "weight of the teacher in the mixture", False, False)


def _jsd_slope(pair: DistributionPair, beta: float, slope: Tensor, scratch: Tensor) -> Tensor:
    middle = (
        torch.lerp(pair.student_probs, pair.teacher_probs, beta, out=slope)
        .clamp_(min=SMALLEST)
        .log_()
    )
    from_teacher = torch.sub(pair.teacher, middle, out=scratch).mul_(pair.teacher_probs).sum(dim=-1)
    torch.sub(pair.student, middle, out=slope).mul_(pair.student_probs)
    value = beta * from_teacher + (1.0 - beta) * slope.sum(dim=-1)
    slope.mul_(1.0 - beta)
    return value


@DIVERGENCES.enter(BETA, "2306.13649", "generalised Jensen-Shannon, bounded", slope=_jsd_slope)
def _jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    from_teacher = -teacher.exp() * _log_mix(student - teacher, 1.0 - beta)
    from_student = -student.exp() * _log_mix(teacher - student, beta)
    return beta * from_teacher + (1.0 - beta) * from_student


def jsd(
    student: Float[Tensor, "*s V"], teacher: Float[Tensor, "*s V"], beta: float = 0.5
) -> Float[Tensor, "*s"]:
    """beta KL(T || M) + (1 - beta) KL(S || M) with M = beta T + (1 - beta) S (GKD, arXiv 2306.13649).

    `beta` is the *teacher's* weight, as in GKD and unlike DistiLLM's code. The value is at most the entropy of a coin
    with bias beta; it vanishes at both ends, for which see `jsd_normalized`.
    """
    return DIVERGENCES["jsd"].value(student, teacher, beta)


BETA_CLOSED = Parameter(
    "beta", 0.5, 0.0, 1.0, "weight of the teacher in the mixture; 0 is forward, 1 reverse KL"
)


def _jsd_normalized_slope(
    pair: DistributionPair, beta: float, slope: Tensor, scratch: Tensor
) -> Tensor:
    if beta in (0.0, 1.0):
        return (_reverse_kl_slope if beta else _forward_kl_slope)(pair, beta, slope, scratch)
    value = _jsd_slope(pair, beta, slope, scratch)
    slope.div_(beta * (1.0 - beta))
    return value / (beta * (1.0 - beta))


@DIVERGENCES.enter(
    BETA_CLOSED, "2306.13649", "jsd / (beta (1 - beta))", slope=_jsd_normalized_slope
)
def _jsd_normalized(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    if beta in (0.0, 1.0):
        return (_reverse_kl if beta else _forward_kl)(student, teacher, beta)
    return _jsd(student, teacher, beta) / (beta * (1.0 - beta))


def jsd_normalized(
    student: Float[Tensor, "*s V"], teacher: Float[Tensor, "*s V"], beta: float = 0.5
) -> Float[Tensor, "*s"]:
    """`jsd(beta) / (beta (1 - beta))`: forward KL at 0, reverse KL at 1, continuous in between.

    GKD (arXiv 2306.13649) takes the two KLs at the ends without this factor, so that its scale jumps there.
    """
    return DIVERGENCES["jsd_normalized"].value(student, teacher, beta)


ALPHA_SKEW_FORWARD = Parameter(
    "alpha", 0.1, 0.0, 1.0, "teacher mass in the mixture; 0 is forward KL", True, False
)


def _skew_forward_kl_slope(
    pair: DistributionPair, alpha: float, slope: Tensor, scratch: Tensor
) -> Tensor:
    mixed = torch.lerp(pair.student_probs, pair.teacher_probs, alpha, out=slope).clamp_(
        min=SMALLEST
    )
    torch.log(mixed, out=scratch)
    value = torch.sub(pair.teacher, scratch, out=scratch).mul_(pair.teacher_probs).sum(dim=-1)
    torch.div(pair.student_probs, mixed, out=slope).mul_(pair.teacher_probs).mul_(alpha - 1.0)
    return value


@DIVERGENCES.enter(
    ALPHA_SKEW_FORWARD, "2402.03898", "KL(T || aT + (1-a)S)", slope=_skew_forward_kl_slope
)
def _skew_forward_kl(student: Tensor, teacher: Tensor, alpha: float) -> Tensor:
    return -teacher.exp() * _log_mix(student - teacher, 1.0 - alpha)


def skew_forward_kl(
    student: Float[Tensor, "*s V"], teacher: Float[Tensor, "*s V"], alpha: float = 0.1
) -> Float[Tensor, "*s"]:
    """KL(T || alpha T + (1 - alpha) S), at most -log alpha (DistiLLM, arXiv 2402.03898)."""
    return DIVERGENCES["skew_forward_kl"].value(student, teacher, alpha)


ALPHA_SKEW_REVERSE = Parameter(
    "alpha", 0.1, 0.0, 1.0, "student mass in the mixture; 0 is reverse KL", True, False
)


@DIVERGENCES.enter(ALPHA_SKEW_REVERSE, "2402.03898", "KL(S || (1-a)T + aS)")
def _skew_reverse_kl(student: Tensor, teacher: Tensor, alpha: float) -> Tensor:
    return -student.exp() * _log_mix(floored(student, teacher) - student, 1.0 - alpha)


def skew_reverse_kl(
    student: Float[Tensor, "*s V"], teacher: Float[Tensor, "*s V"], alpha: float = 0.1
) -> Float[Tensor, "*s"]:
    """KL(S || (1 - alpha) T + alpha S), at most -log alpha (DistiLLM, arXiv 2402.03898).

    The mixture is differentiated too; DistiLLM-2's code detaches it, which is a different gradient.
    """
    return DIVERGENCES["skew_reverse_kl"].value(student, teacher, alpha)


W = Parameter("w", 0.5, 0.0, 1.0, "weight of forward KL")


def _mixed_kl_slope(pair: DistributionPair, w: float, slope: Tensor, scratch: Tensor) -> Tensor:
    forward = (
        torch.sub(pair.teacher, pair.student, out=scratch).mul_(pair.teacher_probs).sum(dim=-1)
    )
    reverse = _reverse_kl_slope(pair, w, slope, scratch)
    slope.mul_(1.0 - w).sub_(pair.teacher_probs, alpha=w)
    return w * forward + (1.0 - w) * reverse


@DIVERGENCES.enter(W, "2310.07177", "w forward + (1 - w) reverse KL", slope=_mixed_kl_slope)
def _mixed_kl(student: Tensor, teacher: Tensor, w: float) -> Tensor:
    return w * _forward_kl(student, teacher, w) + (1.0 - w) * _reverse_kl(student, teacher, w)


def mixed_kl(
    student: Float[Tensor, "*s V"], teacher: Float[Tensor, "*s V"], w: float = 0.5
) -> Float[Tensor, "*s"]:
    """w KL(T || S) + (1 - w) KL(S || T); half of Jeffreys' divergence at 1/2 (used in OSD, arXiv 2310.07177)."""
    return DIVERGENCES["mixed_kl"].value(student, teacher, w)


ALPHA = Parameter(
    "alpha", 0.5, 0.0, 1.0, "1 tends to forward_kl, 0 to reverse_kl: write those", False, False
)


@DIVERGENCES.enter(ALPHA, "2606.01039", "Amari's alpha-divergence")
def _alpha(student: Tensor, teacher: Tensor, alpha: float) -> Tensor:
    # Sums to the textbook (1 - sum T^a S^(1-a)) / (a (1 - a)) and is non-negative for each candidate. Written from
    # the larger of the two, so that no exponential overflows.
    below, above = (teacher - student).clamp(max=0.0), (student - teacher).clamp(max=0.0)
    from_student = student.exp() * (alpha * torch.expm1(below) - torch.expm1(alpha * below))
    rest = 1.0 - alpha
    from_teacher = teacher.exp() * (rest * torch.expm1(above) - torch.expm1(rest * above))
    return torch.where(teacher < student, from_student, from_teacher) / (alpha * rest)


def alpha(
    student: Float[Tensor, "*s V"], teacher: Float[Tensor, "*s V"], alpha: float = 0.5
) -> Float[Tensor, "*s"]:
    """Amari's (1 - sum T^a S^(1-a)) / (a (1 - a)), at most 1 / (a (1 - a)) (as in OPD+, arXiv 2606.01039)."""
    return DIVERGENCES["alpha"].value(student, teacher, alpha)


def _tvd_slope(pair: DistributionPair, _: float, slope: Tensor, scratch: Tensor) -> Tensor:
    torch.sub(pair.student_probs, pair.teacher_probs, out=slope)
    value = 0.5 * torch.abs(slope, out=scratch).sum(dim=-1)
    slope.sign_().mul_(pair.student_probs).mul_(0.5)
    return value


@DIVERGENCES.enter(
    None, "2310.08461", "total variation: 1 - speculative acceptance", slope=_tvd_slope
)
def _tvd(student: Tensor, teacher: Tensor, _: float) -> Tensor:
    return 0.5 * (teacher.exp() - student.exp()).abs()


def tvd(student: Float[Tensor, "*s V"], teacher: Float[Tensor, "*s V"]) -> Float[Tensor, "*s"]:
    """Half of sum |T - S|: one minus the acceptance rate of speculative decoding (DistillSpec, arXiv 2310.08461)."""
    return DIVERGENCES["tvd"].value(student, teacher)


@DIVERGENCES.enter(
    None,
    "2404.02657",
    "mixed_kl, w by head gap",
    pointwise=False,
    f_divergence=False,
    exact_gradient=False,
)
def _adaptive_kl(student: Tensor, teacher: Tensor, _: float) -> Tensor:
    """The weight of forward KL is the head's share of |T - S|; at equality, where it is 0 / 0, it is one half."""
    gap = (teacher.exp() - student.exp()).abs().detach()
    mass, order = teacher.exp().sort(dim=-1, descending=True)
    in_head = (mass.cumsum(dim=-1) - mass < HEAD_MASS).to(gap.dtype)
    head, total = (
        (gap.gather(-1, order) * in_head).sum(dim=-1, keepdim=True),
        gap.sum(dim=-1, keepdim=True),
    )
    w = torch.where(total > 0, head / total.clamp(min=torch.finfo(gap.dtype).tiny), 0.5).detach()
    return w * _forward_kl(student, teacher, 0.0) + (1.0 - w) * _reverse_kl(student, teacher, 0.0)


def adaptive_kl(
    student: Float[Tensor, "*s V"], teacher: Float[Tensor, "*s V"]
) -> Float[Tensor, "*s"]:
    """w KL(T || S) + (1 - w) KL(S || T), w the share of |T - S| in the teacher's top half (AKL, arXiv 2404.02657).

    The weight is held constant in the gradient, and is one half where student and teacher agree exactly.
    """
    return DIVERGENCES["adaptive_kl"].value(student, teacher)


@DIVERGENCES.enter(
    None, "2505.16297", "mixed_kl, w = T / (T + S)", f_divergence=False, exact_gradient=False
)
def _todi(student: Tensor, teacher: Tensor, _: float) -> Tensor:
    w = torch.sigmoid(teacher - student).detach()
    return w * _forward_kl(student, teacher, 0.0) + (1.0 - w) * _reverse_kl(student, teacher, 0.0)


def todi(student: Float[Tensor, "*s V"], teacher: Float[Tensor, "*s V"]) -> Float[Tensor, "*s"]:
    """Each token's forward and reverse KL terms weighted by T / (T + S) and S / (T + S) (ToDi, arXiv 2505.16297).

    The weights are held constant, so the gradient is not that of the value.
    """
    return DIVERGENCES["todi"].value(student, teacher)


POWER = Parameter(
    "alpha", 0.5, 0.0, math.inf, "power of the probabilities; 0 tends to reverse_kl", False, False
)


@DIVERGENCES.enter(POWER, "2606.17199", "bounded Bregman", f_divergence=False)
def _density_power(student: Tensor, teacher: Tensor, alpha: float) -> Tensor:
    # (S^a - T^a) / a through expm1, which tends to log S - log T without losing digits.
    gap = (torch.expm1(alpha * student) - torch.expm1(alpha * teacher)) / alpha
    power = 1.0 + alpha
    return student.exp() * gap - ((power * student).exp() - (power * teacher).exp()) / power


def density_power(
    student: Float[Tensor, "*s V"], teacher: Float[Tensor, "*s V"], alpha: float = 0.5
) -> Float[Tensor, "*s"]:
    """sum (S^(1+a) - T^(1+a)) / (a (1+a)) - T^a (S - T) / a, a Bregman divergence (Basu et al. 1998).

    Half of the squared distance at a = 1, reverse KL as a tends to 0; its advantage (T^a - S^a) / a is the bounded
    reward of PowerOPD (arXiv 2606.17199).
    """
    return DIVERGENCES["density_power"].value(student, teacher, alpha)


def _ce_slope(pair: DistributionPair, _: float, slope: Tensor, scratch: Tensor) -> Tensor:
    torch.neg(pair.teacher_probs, out=slope)
    return torch.mul(slope, pair.student, out=scratch).sum(dim=-1)


@DIVERGENCES.enter(
    None,
    "1503.02531",
    "forward KL + H(T)",
    f_divergence=False,
    zero_at_equality=False,
    slope=_ce_slope,
)
def _ce(student: Tensor, teacher: Tensor, _: float) -> Tensor:
    return -teacher.exp() * student


def ce(student: Float[Tensor, "*s V"], teacher: Float[Tensor, "*s V"]) -> Float[Tensor, "*s"]:
    """Cross-entropy -sum T log S: the gradient of forward KL, and H(T) more in value (arXiv 1503.02531)."""
    return DIVERGENCES["ce"].value(student, teacher)


@DIVERGENCES.enter(
    None,
    "2105.08919",
    "squared gap of centred log-probabilities",
    pointwise=False,
    f_divergence=False,
)
def _mse(student: Tensor, teacher: Tensor, _: float) -> Tensor:
    possible = ((student > IMPOSSIBLE) & (teacher > IMPOSSIBLE)).to(student.dtype)
    count = possible.sum(dim=-1, keepdim=True).clamp(min=1.0)
    gap = (student - teacher) * possible
    return possible * (gap - gap.sum(dim=-1, keepdim=True) / count).square() / count


def mse(student: Float[Tensor, "*s V"], teacher: Float[Tensor, "*s V"]) -> Float[Tensor, "*s"]:
    """Mean squared gap of log-probabilities, each centred first so that only differences count (arXiv 2105.08919).

    Tokens that either holds impossible are left out.
    """
    return DIVERGENCES["mse"].value(student, teacher)
