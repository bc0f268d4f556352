"""The laws of divergences: each takes an entry, its parameter, and float64 logits [positions, V]."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from practicum.functional.distributions import SUPPORTS, TAILS, candidates, restrict
from practicum.functional.divergence_entry import DistributionPair, Divergence
from practicum.functional.laws.requirements import (
    differentiate,
    normalize,
    require,
    require_close,
    show,
)

Law = Callable[[Divergence, float | None, Tensor, Tensor], None]


def zero_at_equality(
    divergence: Divergence, parameter: float | None, student: Tensor, teacher: Tensor
) -> None:
    """Value and slope are 0 where student and teacher agree, unless the entry says otherwise."""
    same = normalize(student)
    value = divergence.value(same, same, parameter)
    if divergence.zero_at_equality:
        require(value.abs() <= 1e-12, f"the value at equality is {show(value)}")
    slope = differentiate(lambda s: divergence.value(s, same, parameter), student)
    require(slope.abs() <= 1e-12, f"the gradient at equality is {show(slope)}")


def non_negative(
    divergence: Divergence, parameter: float | None, student: Tensor, teacher: Tensor
) -> None:
    """The value is positive where they differ, and at least 0 up to rounding near equality."""
    value = divergence.value(normalize(student), normalize(teacher), parameter)
    require(value > 0, f"the value is {show(value)}")
    neighbour = normalize(student + 1e-4 * teacher)
    value = divergence.value(normalize(student).float(), neighbour.float(), parameter)
    require(value >= -1e-6, f"the value near equality is {show(value)} in float32")


def gradient_is_of_the_value(
    divergence: Divergence, parameter: float | None, student: Tensor, teacher: Tensor
) -> None:
    """The gradient equals finite differences of the value, if the entry claims `exact_gradient`."""
    if not divergence.exact_gradient:
        return
    logits, target = student[:2].clone().requires_grad_(), normalize(teacher[:2])
    is_exact = torch.autograd.gradcheck(
        lambda z: divergence.value(normalize(z), target, parameter),
        (logits,),
        raise_exception=False,
    )
    require(
        is_exact,
        "the gradient differs from the value's; detach nothing, or set exact_gradient=False",
    )


def order_of_the_vocabulary(
    divergence: Divergence, parameter: float | None, student: Tensor, teacher: Tensor
) -> None:
    """The order of the tokens in the vocabulary does not matter."""
    order = torch.randperm(student.shape[-1], generator=torch.Generator().manual_seed(1))
    s, t = normalize(student), normalize(teacher)
    shuffled = divergence.value(s[:, order], t[:, order], parameter)
    value = divergence.value(s, t, parameter)
    require_close(shuffled, value, f"with the tokens in the order {order.tolist()} the value is")


def sum_over_positions(
    divergence: Divergence, parameter: float | None, student: Tensor, teacher: Tensor
) -> None:
    """The value at a position does not depend on other positions: a batch may be split."""
    s, t = normalize(student), normalize(teacher)
    value = divergence.value(s, t, parameter)
    require(value.shape == s.shape[:-1], f"the value has the shape {list(value.shape)}")
    alone = [divergence.value(s[i], t[i], parameter) for i in range(len(s))]
    require_close(torch.stack(alone), value, "one position at a time the value is")


def sharp_stays_finite(
    divergence: Divergence, parameter: float | None, student: Tensor, teacher: Tensor
) -> None:
    """Value and gradient stay finite in float32 for distributions that are almost certain."""
    s, t = student.float() * 60, teacher.float() * 60
    value = divergence.value(normalize(s), normalize(t), parameter)
    require(value.isfinite(), f"the value is {show(value)} with 60 times these logits")
    slope = differentiate(lambda x: divergence.value(x, normalize(t), parameter), s)
    require(slope.isfinite(), f"the gradient is {show(slope)} with 60 times these logits")


def impossible_stays_finite(
    divergence: Divergence, parameter: float | None, student: Tensor, teacher: Tensor
) -> None:
    """Impossible tokens (-inf) give no NaN; tokens impossible for both models have no effect."""
    banned = torch.arange(student.shape[-1]) % 3 == 1
    t = normalize(teacher.masked_fill(banned, -math.inf))
    forbidden = student.masked_fill(banned, -math.inf)
    for s, target in ((student, t), (forbidden, t), (forbidden, normalize(teacher))):
        value = divergence.value(normalize(s), target, parameter)
        slope = differentiate(lambda x, y=target: divergence.value(x, y, parameter), s)
        text = f"value {show(value)} and gradient {show(slope)} with impossible tokens"
        require(value.isfinite().all() & slope.isfinite().all(), text)
    value = divergence.value(normalize(forbidden), t, parameter)
    small = divergence.value(normalize(student[:, ~banned]), t[:, ~banned], parameter)
    require_close(value, small, "with tokens that are impossible for both the value is")


def sampled_expectation(
    divergence: Divergence, parameter: float | None, student: Tensor, teacher: Tensor
) -> None:
    """The sampled form, averaged over every token, has the gradient of the value, if `pointwise`."""
    if not divergence.pointwise:
        return
    s, t = normalize(student), normalize(teacher)
    # Each token separately, as in sampling: the term must not see any other token.
    advantage = divergence.advantage(s.unsqueeze(-1), t.unsqueeze(-1), parameter).squeeze(-1)
    sampled = differentiate(lambda x: -(s.exp() * advantage * x).sum(-1), student)
    exact = differentiate(lambda x: divergence.value(x, t, parameter), student)
    require_close(sampled, exact, "the gradient of the sampled form is")


def head_and_sampled_tail(
    divergence: Divergence, parameter: float | None, student: Tensor, teacher: Tensor
) -> None:
    """The exact part of two candidates and the sampled rest add up to the whole gradient."""
    if not divergence.pointwise:
        return
    s, t = normalize(student), normalize(teacher)
    ids, valid = candidates(s, t, 2, "student")
    tail = torch.ones_like(s).scatter(-1, ids, 0.0)
    alone = s.unsqueeze(-1), t.unsqueeze(-1)
    coefficient = divergence.tail_coefficient(*alone, parameter).squeeze(-1)

    def compute_hybrid(x: Tensor) -> Tensor:
        head = divergence.value(
            restrict(x, ids, valid, "sampled"), restrict(t, ids, valid, "sampled"), parameter
        )
        return head + (tail * s.exp() * coefficient * x).sum(-1)

    exact = differentiate(lambda x: divergence.value(x, t, parameter), student)
    require_close(differentiate(compute_hybrid, student), exact, "with a sampled tail it is")


def advantage_in_float32(
    divergence: Divergence, parameter: float | None, student: Tensor, teacher: Tensor
) -> None:
    """A sampled token's advantage is 0 at equality, and as good in float32 as in float64."""
    if not divergence.pointwise:
        return
    lowest = torch.linspace(-80, -1e-3, 41)
    value = divergence.advantage(lowest, lowest, parameter)
    require(value.abs() <= 1e-6, f"the advantage at equality is {show(value)}")
    for shift in (-3.0, -0.01, 0.01, 3.0):
        teacher_logprobs = (lowest + shift).clamp(max=-1e-4)
        single = divergence.advantage(lowest, teacher_logprobs, parameter)
        double = divergence.advantage(lowest.double(), teacher_logprobs.double(), parameter)
        require(single.dtype == torch.float32, f"the advantage is {single.dtype} for float32")
        is_close = torch.isclose(single.double(), double, rtol=1e-6, atol=1e-9)
        require(is_close, f"the advantage is {show(single)}, in float64 {show(double)}")


def all_candidates_equal_the_full_form(
    divergence: Divergence, parameter: float | None, student: Tensor, teacher: Tensor
) -> None:
    """A top-k with k equal to the vocabulary is the full value, with any support and tail."""
    s, t = normalize(student), normalize(teacher)
    full_value = divergence.value(s, t, parameter)
    for support in SUPPORTS:
        ids, valid = candidates(s, t, s.shape[-1] + 3, support)
        for tail in TAILS:
            part = divergence.value(
                restrict(s, ids, valid, tail), restrict(t, ids, valid, tail), parameter
            )
            require_close(part, full_value, f"with support={support} and tail={tail} the value is")


def bucket_is_a_lower_bound(
    divergence: Divergence, parameter: float | None, student: Tensor, teacher: Tensor
) -> None:
    """A top-k value with one bucket for the rest never exceeds the full value, if `f_divergence`."""
    if not divergence.f_divergence:
        return
    s, t = normalize(student), normalize(teacher)
    full_value = divergence.value(s, t, parameter)
    for support in SUPPORTS:
        ids, valid = candidates(s, t, 3, support)
        part = divergence.value(
            restrict(s, ids, valid, "bucket"), restrict(t, ids, valid, "bucket"), parameter
        )
        text = f"with one bucket ({support}) it is {show(part)}, on all tokens {show(full_value)}"
        require((part <= full_value + 1e-5) & (part >= -1e-6), text)


def slope_is_the_derivative(
    divergence: Divergence, parameter: float | None, student: Tensor, teacher: Tensor
) -> None:
    """A slope gives the value and the gradient of autograd, and does not change its inputs."""
    if divergence.slope is None:
        return
    resolved = divergence.resolve(parameter)
    for s, t in (
        (normalize(student), normalize(teacher)),
        (normalize(student), normalize(student + 0.1 * teacher)),
        (normalize(40 * student), normalize(teacher)),
    ):
        pair = DistributionPair(s, s.exp(), t, t.exp())
        before = [tensor.clone() for tensor in (s, pair.student_probs, t, pair.teacher_probs)]
        slope, more = torch.full_like(s, math.nan), torch.full_like(s, math.nan)
        value = divergence.slope(pair, resolved, slope, lambda more=more: more)
        expected = divergence.value(s, t, parameter)
        is_close = torch.isclose(value, expected, rtol=1e-9, atol=1e-12)
        require(is_close, f"the slope's value is {show(value)} and not {show(expected)}")
        # Up to a multiple of S, which no gradient of the logits sees.
        in_logits = slope - s.exp() * slope.sum(-1, keepdim=True)
        exact = differentiate(lambda x, target=t: divergence.value(x, target, parameter), s)
        is_close = torch.isclose(in_logits, exact, rtol=1e-9, atol=1e-12)
        require(is_close, f"the slope is {show(in_logits)} and not {show(exact)}")
        for tensor, old in zip((s, pair.student_probs, t, pair.teacher_probs), before, strict=True):
            require(torch.equal(tensor, old), "the slope writes into its inputs")


DIVERGENCE_LAWS: tuple[Law, ...] = (
    zero_at_equality,
    non_negative,
    gradient_is_of_the_value,
    order_of_the_vocabulary,
    sum_over_positions,
    sharp_stays_finite,
    impossible_stays_finite,
    sampled_expectation,
    head_and_sampled_tail,
    advantage_in_float32,
    all_candidates_equal_the_full_form,
    bucket_is_a_lower_bound,
    slope_is_the_derivative,
)
"""Every law that all divergences must obey."""
