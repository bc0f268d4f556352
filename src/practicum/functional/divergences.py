"""Every divergence, as one pointwise function of two log-probabilities.

A *term* gives the contribution of each candidate to the divergence; the sum over the last axis is
its value. The pathwise loss, the advantage of a sampled token, and the coefficient of a sampled
tail all follow from the term. So a new divergence is one block: an optional parameter and slope,
its term with its facts, and its public function.

Functions take the log-probabilities of the student, then of the teacher, and return one number per
position. S and T are the probabilities, r = T / S. Terms receive finite log-probabilities, with
-inf replaced by `IMPOSSIBLE`, and may receive sub-distributions.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.functional.chunked import sum_products
from practicum.functional.divergence_entry import (
    DIVERGENCES,
    DistributionPair,
    Divergence,
    Parameter,
    Room,
)
from practicum.functional.precision import IMPOSSIBLE

# fmt: off
__all__ = [
    "DIVERGENCES", "TEACHER_FLOOR", "Divergence", "Parameter", "adaptive_kl", "alpha", "ce",
    "density_power", "forward_kl", "jsd", "jsd_normalized", "mixed_kl", "mse", "reverse_kl",
    "skew_forward_kl", "skew_reverse_kl", "todi", "tvd",
]
# fmt: on

TEACHER_FLOOR = -50.0
"""The floor of the teacher's log-probabilities in reverse KL, or the student's log-probability if
it is lower.

Without a floor, one token that the teacher considers impossible makes the value infinite. With the
floor, a token to which both models give less than the floor costs nothing, so the value is still 0
at equality.
"""

SMALLEST = 1e-38
"""The replacement of 0 under a logarithm."""

HEAD_MASS = 0.5
"""The teacher mass of the head of `adaptive_kl`, the value of its paper."""


def floored(student: Tensor, teacher: Tensor, out: Tensor | None = None) -> Tensor:
    """Raise the teacher's log-probabilities to `TEACHER_FLOOR`, or to the student's if lower."""
    floor = torch.clamp(student.detach(), max=TEACHER_FLOOR, out=out)
    return torch.maximum(teacher, floor, out=out)


def _log_mix(log_ratio: Tensor, weight: float) -> Tensor:
    """Return `log(1 - weight + weight * exp(log_ratio))`, exact to rounding near and far from 0."""
    # log1p keeps the digits near 0, but loses them near -1 and overflows for large ratios: there
    # logaddexp takes over. The clamps keep the unused branch and its gradient finite.
    growth = weight * torch.expm1(log_ratio.clamp(max=20.0))
    near_zero = torch.log1p(growth.clamp(min=-0.5))
    log_constant = torch.full_like(log_ratio, math.log1p(-weight) if weight < 1.0 else -math.inf)
    far = torch.logaddexp(log_constant, log_ratio + math.log(weight))
    return torch.where((log_ratio < 20.0) & (growth > -0.5), near_zero, far)


def _forward_kl_slope(pair: DistributionPair, _: float, slope: Tensor, room: Room) -> Tensor:
    value = _compute_forward_kl(pair, slope)
    torch.neg(pair.teacher_probs, out=slope)
    return value


def _compute_forward_kl(pair: DistributionPair, out: Tensor) -> Tensor:
    """Return KL(T || S); the matrix `out` is overwritten."""
    return torch.sub(pair.teacher, pair.student, out=out).mul_(pair.teacher_probs).sum(dim=-1)


@DIVERGENCES.enter(
    None, "1503.02531", "KL(T || S), covers the teacher's modes", slope=_forward_kl_slope
)
def _forward_kl(student: Tensor, teacher: Tensor, _: float) -> Tensor:
    return teacher.exp() * (teacher - student)


def forward_kl(
    student: Float[Tensor, "*s V"], teacher: Float[Tensor, "*s V"]
) -> Float[Tensor, "*s"]:
    """Return KL(T || S) = sum T (log T - log S), the classic distillation loss (arXiv 1503.02531).

    Gradient in the student's logits: S - T. It is unbounded if the student gives no mass to a token
    of the teacher.
    """
    return DIVERGENCES["forward_kl"].value(student, teacher)


def _reverse_kl_slope(pair: DistributionPair, _: float, slope: Tensor, room: Room) -> Tensor:
    torch.sub(pair.student, floored(pair.student, pair.teacher, out=slope), out=slope)
    return slope.mul_(pair.student_probs).sum(dim=-1)


@DIVERGENCES.enter(
    None, "2306.08543", "KL(S || T), seeks the teacher's modes", slope=_reverse_kl_slope
)
def _reverse_kl(student: Tensor, teacher: Tensor, _: float) -> Tensor:
    return student.exp() * (student - floored(student, teacher))


def reverse_kl(
    student: Float[Tensor, "*s V"], teacher: Float[Tensor, "*s V"]
) -> Float[Tensor, "*s"]:
    """Return KL(S || T) = sum S (log S - log T), with `TEACHER_FLOOR` under log T (MiniLLM, arXiv
    2306.08543).

    Gradient in the student's logits: S (log S - log T - KL).
    """
    return DIVERGENCES["reverse_kl"].value(student, teacher)


BETA = Parameter("beta", 0.5, 0.0, 1.0, "weight of the teacher in the mixture", False, False)


def _jsd_slope(pair: DistributionPair, beta: float, slope: Tensor, room: Room) -> Tensor:
    middle = (
        torch.lerp(pair.student_probs, pair.teacher_probs, beta, out=slope)
        .clamp_(min=SMALLEST)
        .log_()
    )
    from_teacher = torch.sub(pair.teacher, middle, out=room()).mul_(pair.teacher_probs).sum(dim=-1)
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
    """Return beta KL(T || M) + (1 - beta) KL(S || M) with M = beta T + (1 - beta) S (GKD, arXiv
    2306.13649).

    `beta` is the *teacher's* weight, as in GKD and unlike DistiLLM's code. The value is at most the
    entropy of a coin with bias beta; it vanishes at both ends, where `jsd_normalized` does not.
    """
    return DIVERGENCES["jsd"].value(student, teacher, beta)


BETA_CLOSED = Parameter(
    "beta", 0.5, 0.0, 1.0, "weight of the teacher in the mixture; 0 is forward, 1 reverse KL"
)


def _jsd_normalized_slope(pair: DistributionPair, beta: float, slope: Tensor, room: Room) -> Tensor:
    if beta in (0.0, 1.0):
        return (_reverse_kl_slope if beta else _forward_kl_slope)(pair, beta, slope, room)
    value = _jsd_slope(pair, beta, slope, room)
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
    """Return `jsd(beta) / (beta (1 - beta))`: forward KL at 0, reverse KL at 1, continuous in
    between.

    GKD (arXiv 2306.13649) uses the two KLs at the ends without this factor, so that its scale jumps
    there.
    """
    return DIVERGENCES["jsd_normalized"].value(student, teacher, beta)


ALPHA_SKEW_FORWARD = Parameter(
    "alpha", 0.1, 0.0, 1.0, "teacher mass in the mixture; 0 is forward KL", True, False
)


def _skew_forward_kl_slope(
    pair: DistributionPair, alpha: float, slope: Tensor, room: Room
) -> Tensor:
    mixed = torch.lerp(pair.student_probs, pair.teacher_probs, alpha, out=slope).clamp_(
        min=SMALLEST
    )
    log_mixed = torch.log(mixed, out=room())
    value = torch.sub(pair.teacher, log_mixed, out=log_mixed).mul_(pair.teacher_probs).sum(dim=-1)
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
    """Return KL(T || alpha T + (1 - alpha) S), at most -log alpha (DistiLLM, arXiv 2402.03898)."""
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
    """Return KL(S || (1 - alpha) T + alpha S), at most -log alpha (DistiLLM, arXiv 2402.03898).

    The mixture is differentiated too; DistiLLM-2's code detaches it, which is a different gradient.
    """
    return DIVERGENCES["skew_reverse_kl"].value(student, teacher, alpha)


W = Parameter("w", 0.5, 0.0, 1.0, "weight of forward KL")


def _mixed_kl_slope(pair: DistributionPair, w: float, slope: Tensor, room: Room) -> Tensor:
    forward = _compute_forward_kl(pair, slope)
    reverse = _reverse_kl_slope(pair, w, slope, room)
    slope.mul_(1.0 - w).sub_(pair.teacher_probs, alpha=w)
    return w * forward + (1.0 - w) * reverse


@DIVERGENCES.enter(W, "2310.07177", "w forward + (1 - w) reverse KL", slope=_mixed_kl_slope)
def _mixed_kl(student: Tensor, teacher: Tensor, w: float) -> Tensor:
    return w * _forward_kl(student, teacher, w) + (1.0 - w) * _reverse_kl(student, teacher, w)


def mixed_kl(
    student: Float[Tensor, "*s V"], teacher: Float[Tensor, "*s V"], w: float = 0.5
) -> Float[Tensor, "*s"]:
    """Return w KL(T || S) + (1 - w) KL(S || T); at 1/2 it is half of Jeffreys' divergence (used in
    OSD, arXiv 2310.07177).
    """
    return DIVERGENCES["mixed_kl"].value(student, teacher, w)


ALPHA = Parameter(
    "alpha", 0.5, 0.0, 1.0, "1 tends to forward_kl, 0 to reverse_kl: write those", False, False
)


@DIVERGENCES.enter(ALPHA, "2606.01039", "Amari's alpha-divergence")
def _alpha(student: Tensor, teacher: Tensor, alpha: float) -> Tensor:
    # Sums to the textbook (1 - sum T^a S^(1-a)) / (a (1 - a)) and is non-negative for each
    # candidate. Each side starts from the larger of the two, so that no exponential overflows.
    below, above = (teacher - student).clamp(max=0.0), (student - teacher).clamp(max=0.0)
    from_student = student.exp() * (alpha * torch.expm1(below) - torch.expm1(alpha * below))
    complement = 1.0 - alpha
    from_teacher = teacher.exp() * (
        complement * torch.expm1(above) - torch.expm1(complement * above)
    )
    return torch.where(teacher < student, from_student, from_teacher) / (alpha * complement)


def alpha(
    student: Float[Tensor, "*s V"], teacher: Float[Tensor, "*s V"], alpha: float = 0.5
) -> Float[Tensor, "*s"]:
    """Return Amari's (1 - sum T^a S^(1-a)) / (a (1 - a)), at most 1 / (a (1 - a)) (as in OPD+,
    arXiv 2606.01039).
    """
    return DIVERGENCES["alpha"].value(student, teacher, alpha)


def _tvd_slope(pair: DistributionPair, _: float, slope: Tensor, room: Room) -> Tensor:
    torch.sub(pair.student_probs, pair.teacher_probs, out=slope)
    value = 0.5 * torch.abs(slope, out=room()).sum(dim=-1)
    slope.sign_().mul_(pair.student_probs).mul_(0.5)
    return value


@DIVERGENCES.enter(
    None, "2310.08461", "total variation: 1 - speculative acceptance", slope=_tvd_slope
)
def _tvd(student: Tensor, teacher: Tensor, _: float) -> Tensor:
    return 0.5 * (teacher.exp() - student.exp()).abs()


def tvd(student: Float[Tensor, "*s V"], teacher: Float[Tensor, "*s V"]) -> Float[Tensor, "*s"]:
    """Return half of sum `|T - S|`: one minus the acceptance rate of speculative decoding
    (DistillSpec, arXiv 2310.08461).
    """
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
    """Weight forward KL by the head's share of `|T - S|`; at equality, 0 / 0, by one half."""
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
    """Return w KL(T || S) + (1 - w) KL(S || T), w the share of `|T - S|` in the teacher's top half
    (AKL, arXiv 2404.02657).

    The gradient treats w as a constant. At exact equality w is one half.
    """
    return DIVERGENCES["adaptive_kl"].value(student, teacher)


@DIVERGENCES.enter(
    None, "2505.16297", "mixed_kl, w = T / (T + S)", f_divergence=False, exact_gradient=False
)
def _todi(student: Tensor, teacher: Tensor, _: float) -> Tensor:
    # T / (T + S), without an exponential that could overflow.
    w = torch.sigmoid(teacher - student).detach()
    return w * _forward_kl(student, teacher, 0.0) + (1.0 - w) * _reverse_kl(student, teacher, 0.0)


def todi(student: Float[Tensor, "*s V"], teacher: Float[Tensor, "*s V"]) -> Float[Tensor, "*s"]:
    """Return the sum of each token's forward and reverse KL terms, weighted by T / (T + S) and S /
    (T + S).

    ToDi, arXiv 2505.16297. The weights are held constant, so the gradient is not the gradient of
    the value.
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
    """Return sum (S^(1+a) - T^(1+a)) / (a (1+a)) - T^a (S - T) / a, a Bregman divergence (Basu et
    al. 1998).

    It is half of the squared distance at a = 1 and tends to reverse KL as a goes to 0. Its
    advantage (T^a - S^a) / a is the bounded reward of PowerOPD (arXiv 2606.17199).
    """
    return DIVERGENCES["density_power"].value(student, teacher, alpha)


def _ce_slope(pair: DistributionPair, _: float, slope: Tensor, room: Room) -> Tensor:
    torch.neg(pair.teacher_probs, out=slope)
    return sum_products(slope, pair.student)


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
    """Return cross-entropy -sum T log S: forward KL plus H(T), same gradient (arXiv 1503.02531)."""
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
    """Return the mean squared gap of log-probabilities, each side centred first (arXiv 2105.08919).

    Tokens that either side considers impossible are left out.
    """
    return DIVERGENCES["mse"].value(student, teacher)
