"""Losses and factors of one sampled token: KL estimators, off-policy corrections, returns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.functional.precision import precise
from practicum.functional.sequence import reward_to_go
from practicum.functional.table import Number, Table, defaults_of


def k1(
    student_logprob: Float[Tensor, "*s"], teacher_logprob: Float[Tensor, "*s"]
) -> Float[Tensor, "*s"]:
    """Return `x = log S - log T`: an unbiased, signed estimate of KL(S || T) for tokens sampled
    from S.

    Gradient as loss: zero in expectation. As detached reward `-k1`: the gradient of reverse KL.
    (arXiv 2510.01555)
    """
    return precise(student_logprob) - precise(teacher_logprob)


def k2(
    student_logprob: Float[Tensor, "*s"], teacher_logprob: Float[Tensor, "*s"]
) -> Float[Tensor, "*s"]:
    """Return `x**2 / 2`: a biased estimate of KL(S || T).

    Gradient as loss: the gradient of reverse KL. As detached reward `-k2`: the gradient of no named
    divergence. (arXiv 2510.01555)
    """
    return k1(student_logprob, teacher_logprob).square() / 2


def k3(
    student_logprob: Float[Tensor, "*s"], teacher_logprob: Float[Tensor, "*s"]
) -> Float[Tensor, "*s"]:
    """Return `exp(-x) - 1 + x`: an unbiased, non-negative estimate of KL(S || T), for monitoring
    rather than training.

    Gradient as loss: the gradient of forward KL. As detached reward `-k3`: the gradient of reverse
    minus forward KL. (arXiv 2510.01555)
    """
    x = k1(student_logprob, teacher_logprob)
    return torch.expm1(-x) + x


@dataclass(frozen=True, slots=True)
class Correction:
    """One off-policy correction: `function(log_ratio, advantage, **parameters)` gives each token's
    detached factor.

    - of: the argument of the logarithm: the ratio learner / `sampler`, that ratio mixed with
      learner / teacher (`anchor`), or the learner's own `probability`
    - cumulative: a token's factor is the product of the ratios of its sequence up to and including
      it
    - without_teacher: the parameter values at which the teacher has no influence
    - drops: the factor is 0 at tokens with a ratio out of bounds; the share of these tokens is
      measured
    """

    name: str
    function: Callable[..., Tensor]
    summary: str
    paper: str = ""
    of: Literal["sampler", "anchor", "probability"] = "sampler"
    cumulative: bool = False
    without_teacher: Mapping[str, float] = field(default_factory=dict)
    drops: bool = False

    @property
    def defaults(self) -> Mapping[str, Number]:
        """The parameters with their defaults."""
        return defaults_of(self.function)


CORRECTIONS = Table(Correction, "corrections")
"""Every off-policy correction by name."""


@CORRECTIONS.enter("no correction: every token has weight 1")
def none(log_ratio: Float[Tensor, " T"], advantage: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Return 1 for every token: no correction."""
    return torch.ones_like(_log_ratio(log_ratio, advantage))


@CORRECTIONS.enter("learner / sampler probability of the token")
def ratio(log_ratio: Float[Tensor, " T"], advantage: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Return the importance ratio learner / sampler of the token itself, which corrects the token
    but not its state.
    """
    return _log_ratio(log_ratio, advantage).exp()


@CORRECTIONS.enter("PPO's one-sided clip", "1707.06347", drops=True)
def ratio_clip(
    log_ratio: Float[Tensor, " T"],
    advantage: Float[Tensor, " T"],
    low: float = 0.2,
    high: float = 0.2,
) -> Float[Tensor, " T"]:
    """Return the ratio, or 0 if it has left [1 - low, 1 + high] in the direction of its advantage.

    This is the gradient of PPO's clipped objective (arXiv 1707.06347), which is one-sided.
    """
    value = ratio(log_ratio, advantage)
    past_bound = ((advantage > 0) & (value > 1 + high)) | ((advantage < 0) & (value < 1 - low))
    return value.masked_fill(past_bound, 0.0)


@CORRECTIONS.enter("ratio inside a band, else 0", "2510.18855", drops=True)
def ratio_mask(
    log_ratio: Float[Tensor, " T"],
    advantage: Float[Tensor, " T"],
    low: float = 0.5,
    high: float = 2.0,
) -> Float[Tensor, " T"]:
    """Return the ratio if it lies in [low, high], else 0 (IcePop, arXiv 2510.18855)."""
    value = ratio(log_ratio, advantage)
    return value.masked_fill((value < low) | (value > high), 0.0)


@CORRECTIONS.enter("ratio up to a maximum", "1802.01561")
def ratio_truncate(
    log_ratio: Float[Tensor, " T"], advantage: Float[Tensor, " T"], maximum: float = 2.0
) -> Float[Tensor, " T"]:
    """Return the ratio, at most `maximum` (V-trace, arXiv 1802.01561; SDPO, 2601.20802)."""
    return ratio(log_ratio, advantage).clamp(max=maximum)


@CORRECTIONS.enter("product of the ratios so far, exact for a score function", cumulative=True)
def prefix_ratio(
    log_ratio: Float[Tensor, " T"], advantage: Float[Tensor, " T"]
) -> Float[Tensor, " T"]:
    """Return the product of the ratios of one sequence up to and including each token: exact, with
    exploding variance.

    It is exact for a score function. A pathwise value at a state needs only the tokens before:
    divide by `ratio`.
    """
    return _log_ratio(log_ratio, advantage).cumsum(dim=-1).exp()


@CORRECTIONS.enter(
    "PPO's clip around a ratio that the teacher anchors",
    "2602.22495",
    "anchor",
    without_teacher={"alpha": 1.0},
    drops=True,
)
def ratio_anchor(
    log_ratio: Float[Tensor, " T"],
    advantage: Float[Tensor, " T"],
    alpha: float = 0.5,
    low: float = 0.2,
    high: float = 0.2,
) -> Float[Tensor, " T"]:
    """Apply PPO's clip to `(S / sampler)**alpha * (S / T)**(1 - alpha)`; `log_ratio` is its
    logarithm (RLAD, arXiv 2602.22495).

    With `alpha` 1 it is `ratio_clip`; below 1 the clip also keeps the student near the teacher.
    """
    return ratio_clip(log_ratio, advantage, low, high)


@CORRECTIONS.enter(
    "for tokens of another author: largest at p = gamma", "2504.14945", "probability"
)
def shaping(
    log_ratio: Float[Tensor, " T"], advantage: Float[Tensor, " T"], gamma: float = 0.1
) -> Float[Tensor, " T"]:
    """Return `p gamma / (p + gamma)**2`, the gradient weight of f(p) = p / (p + gamma); log p is
    given (LUFFY, 2504.14945).

    For tokens of another author: it is largest at p = gamma and small for tokens that the student
    already finds likely.
    """
    p = ratio(log_ratio, advantage)
    return p * gamma / (p + gamma).square()


def _log_ratio(
    log_ratio: Float[Tensor, " T"], advantage: Float[Tensor, " T"]
) -> Float[Tensor, " T"]:
    """Return the detached log-ratio in float32 or better; `advantage` is a parameter so that both
    lengths are checked.
    """
    return precise(log_ratio.detach())


def score_function_returns(
    advantage: Float[Tensor, " T"],
    gamma: float,
    baseline: Float[Tensor, " T"] | float | None = None,
) -> Float[Tensor, " T"]:
    """Return the detached return of each token: its discounted advantage to go minus a baseline of
    its state.

    With `gamma` 0 it is the advantage itself: the gradient of the divergence at each visited state,
    with the states held fixed. With `gamma` 1 it is the gradient of the sequence-level reverse KL
    (MiniLLM, arXiv 2306.08543).
    """
    returns = reward_to_go(advantage.detach(), gamma)
    if baseline is None:
        return returns
    return returns - (precise(baseline.detach()) if isinstance(baseline, Tensor) else baseline)
