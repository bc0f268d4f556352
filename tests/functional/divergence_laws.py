"""The laws of divergences, as functions, so that the mutation check can ask which law catches which fault.

Each law takes a divergence, a parameter, and logits of student and teacher in float64, and asserts.
"""

import math

import torch

from practicum import functional as F
from practicum.functional.divergences import DIVERGENCES, DistributionPair


def random_logits(seed, positions=4, vocabulary=6, scale=1.5, count=2):
    generator = torch.Generator().manual_seed(seed)
    return [
        scale * torch.randn(positions, vocabulary, generator=generator, dtype=torch.float64)
        for _ in range(count)
    ]


def logp(logits):
    return torch.log_softmax(logits, dim=-1)


def gradient(function, logits):
    """Gradient in the logits of the sum of what `function` makes of their log-probabilities."""
    logits = logits.detach().clone().requires_grad_()
    return torch.autograd.grad(function(logp(logits)).sum(), logits)[0]


def close(a, b, rel=1e-12):
    """Relative closeness of whole tensors, as the identities of gradients are stated."""
    error = (a - b).norm() / b.norm().clamp(min=1e-9)
    assert error <= rel, f"relative error {error:.2e} above {rel:.0e}"


def zero_at_equality(divergence, parameter, student, _teacher):
    value = divergence.value(logp(student), logp(student), parameter)
    if divergence.zero_at_equality:
        assert value.abs().max() <= 1e-12
    slope = gradient(lambda s: divergence.value(s, logp(student), parameter), student)
    assert slope.abs().max() <= 1e-12


def non_negative(divergence, parameter, student, teacher):
    assert (divergence.value(logp(student), logp(teacher), parameter) > 0).all()
    near = logp(student + 1e-4 * teacher)
    assert (divergence.value(logp(student).float(), near.float(), parameter) >= -1e-6).all()


def gradient_is_of_the_value(divergence, parameter, student, teacher):
    if divergence.exact_gradient:
        logits = student[:2].clone().requires_grad_()
        assert torch.autograd.gradcheck(
            lambda z: divergence.value(logp(z), logp(teacher[:2]), parameter), (logits,)
        )


def order_of_the_vocabulary(divergence, parameter, student, teacher):
    order = torch.randperm(student.shape[-1], generator=torch.Generator().manual_seed(1))
    s, t = logp(student), logp(teacher)
    close(divergence.value(s[:, order], t[:, order], parameter), divergence.value(s, t, parameter))


def sharp_stays_finite(divergence, parameter, student, teacher):
    s, t = student.float() * 60, teacher.float() * 60
    assert divergence.value(logp(s), logp(t), parameter).isfinite().all()
    assert gradient(lambda x: divergence.value(x, logp(t), parameter), s).isfinite().all()


def impossible_stays_finite(divergence, parameter, student, teacher):
    banned = torch.arange(student.shape[-1]) % 3 == 1
    t = logp(teacher.masked_fill(banned, -math.inf))
    for s in (student, student.masked_fill(banned, -math.inf)):
        value = divergence.value(logp(s), t, parameter)
        assert value.isfinite().all()
        assert gradient(lambda x: divergence.value(x, t, parameter), s).isfinite().all()
    forbidden = student.masked_fill(banned, -math.inf)
    assert divergence.value(logp(forbidden), logp(teacher), parameter).isfinite().all()
    assert (
        gradient(lambda x: divergence.value(x, logp(teacher), parameter), forbidden)
        .isfinite()
        .all()
    )
    # Impossible for both: as if those tokens were not in the vocabulary.
    small = divergence.value(logp(student[:, ~banned]), logp(teacher[:, ~banned]), parameter)
    close(value, small)


def mirror(divergence, parameter, student, teacher):
    """The other direction of each family: forward(p, q) = reverse(q, p)."""
    s, t = logp(student), logp(teacher)
    mirrors = {
        "forward_kl": ("reverse_kl", lambda p: p),
        "reverse_kl": ("forward_kl", lambda p: p),
        "skew_forward_kl": ("skew_reverse_kl", lambda p: p),
        "skew_reverse_kl": ("skew_forward_kl", lambda p: p),
        "jsd": ("jsd", lambda p: 1 - p),
        "jsd_normalized": ("jsd_normalized", lambda p: 1 - p),
        "mixed_kl": ("mixed_kl", lambda p: 1 - p),
        "alpha": ("alpha", lambda p: 1 - p),
        "tvd": ("tvd", lambda p: p),
        "mse": ("mse", lambda p: p),
    }
    if divergence.name in mirrors:
        name, reflect = mirrors[divergence.name]
        other = None if parameter is None else reflect(parameter)
        close(divergence.value(s, t, parameter), DIVERGENCES[name].value(t, s, other), rel=1e-10)


LIMITS = [
    # family, parameter, what the value is divided by, the divergence it tends to
    ("jsd", 1e-6, 1e-6, "forward_kl"),
    ("jsd", 1 - 1e-6, 1e-6, "reverse_kl"),
    ("jsd_normalized", 1e-6, 1.0, "forward_kl"),
    ("jsd_normalized", 1 - 1e-6, 1.0, "reverse_kl"),
    ("jsd_normalized", 0.0, 1.0, "forward_kl"),
    ("jsd_normalized", 1.0, 1.0, "reverse_kl"),
    ("skew_forward_kl", 1e-6, 1.0, "forward_kl"),
    ("skew_forward_kl", 0.0, 1.0, "forward_kl"),
    ("skew_reverse_kl", 1e-6, 1.0, "reverse_kl"),
    ("skew_reverse_kl", 0.0, 1.0, "reverse_kl"),
    ("mixed_kl", 1.0, 1.0, "forward_kl"),
    ("mixed_kl", 0.0, 1.0, "reverse_kl"),
    ("alpha", 1 - 1e-6, 1.0, "forward_kl"),
    ("alpha", 1e-6, 1.0, "reverse_kl"),
    ("density_power", 1e-6, 1.0, "reverse_kl"),
]


def limits(divergence, _parameter, student, teacher):
    s, t = logp(student), logp(teacher)
    for name, parameter, scale, limit in LIMITS:
        if name == divergence.name:
            close(
                divergence.value(s, t, parameter) / scale, DIVERGENCES[limit].value(s, t), rel=1e-3
            )


def bounds(divergence, parameter, student, teacher):
    def coin(b):
        return -b * math.log(b) - (1 - b) * math.log(1 - b)

    highest = {
        "jsd": coin,
        "skew_forward_kl": lambda a: -math.log(a),
        "skew_reverse_kl": lambda a: -math.log(a),
        "alpha": lambda a: 1 / (a * (1 - a)),
        "tvd": lambda _: 1.0,
    }
    if divergence.name in highest:
        bound = highest[divergence.name](parameter)
        value = divergence.value(logp(student * 30), logp(teacher * 30), parameter)
        assert (value <= bound * (1 + 1e-12)).all()
        assert value.max() >= 0.9 * bound  # the bound is the family's own, not a loose one


def sampled_expectation(divergence, parameter, student, teacher):
    """-sum_v S_v A(v) grad log S_v = grad D, by enumeration."""
    if not divergence.pointwise:
        return
    s, t = logp(student), logp(teacher)
    advantage = divergence.advantage(s, t, parameter)
    sampled = gradient(lambda x: -(s.exp() * advantage * x).sum(-1), student)
    close(sampled, gradient(lambda x: divergence.value(x, t, parameter), student))


def head_and_sampled_tail(divergence, parameter, student, teacher):
    """Exact contributions of a head, and the rest from its sampled coefficient, make the whole gradient."""
    if not divergence.pointwise:
        return
    s, t = logp(student), logp(teacher)
    ids, valid = F.candidates(s, t, 2, "student")
    tail = torch.ones_like(s).scatter(-1, ids, 0.0)
    coefficient = divergence.tail_coefficient(s, t, parameter)

    def hybrid(x):
        head = divergence.value(
            F.restrict(x, ids, valid, "sampled"), F.restrict(t, ids, valid, "sampled"), parameter
        )
        return head + (tail * s.exp() * coefficient * x).sum(-1)

    close(gradient(hybrid, student), gradient(lambda x: divergence.value(x, t, parameter), student))


def advantage_in_float32(divergence, parameter, student, teacher):
    """Zero at equality, and float32 as good as float64, for tokens of probability down to exp(-80)."""
    if not divergence.pointwise:
        return
    lowest = torch.linspace(-80, -1e-3, 41)
    assert divergence.advantage(lowest, lowest, parameter).abs().max() <= 1e-6
    for shift in (-3.0, -0.01, 0.01, 3.0):
        other = (lowest + shift).clamp(max=-1e-4)
        single = divergence.advantage(lowest, other, parameter)
        double = divergence.advantage(lowest.double(), other.double(), parameter)
        assert single.dtype == torch.float32
        torch.testing.assert_close(single.double(), double, rtol=1e-6, atol=1e-9)


def all_candidates_are_the_whole(divergence, parameter, student, teacher):
    s, t = logp(student), logp(teacher)
    whole = divergence.value(s, t, parameter)
    for support in F.SUPPORTS:
        ids, valid = F.candidates(s, t, s.shape[-1] + 3, support)
        for tail in F.TAILS:
            part = divergence.value(
                F.restrict(s, ids, valid, tail), F.restrict(t, ids, valid, tail), parameter
            )
            close(part, whole)


def bucket_is_a_lower_bound(divergence, parameter, student, teacher):
    if not divergence.f_divergence:
        return
    s, t = logp(student), logp(teacher)
    for support in F.SUPPORTS:
        ids, valid = F.candidates(s, t, 3, support)
        part = divergence.value(
            F.restrict(s, ids, valid, "bucket"), F.restrict(t, ids, valid, "bucket"), parameter
        )
        assert (part <= divergence.value(s, t, parameter) + 1e-5).all()
        assert (part >= -1e-6).all()


def _kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def _mix(w, p, q):
    return [w * a + (1 - w) * b for a, b in zip(p, q, strict=True)]


def _akl(s, t, _):
    order, mass, head, whole = sorted(range(len(t)), key=lambda v: -t[v]), 0.0, 0.0, 0.0
    for v in order:
        head += abs(t[v] - s[v]) if mass < 0.5 else 0.0
        whole += abs(t[v] - s[v])
        mass += t[v]
    return head / whole * _kl(t, s) + (1 - head / whole) * _kl(s, t)


def _mse(s, t, _):
    gaps = [math.log(a) - math.log(b) for a, b in zip(s, t, strict=True)]
    mean = sum(gaps) / len(gaps)
    return sum((gap - mean) ** 2 for gap in gaps) / len(gaps)


def _jsd(s, t, b):
    return b * _kl(t, _mix(b, t, s)) + (1 - b) * _kl(s, _mix(b, t, s))


TWINS = {
    # The textbook formulas, in probabilities and plain loops.
    "forward_kl": lambda s, t, _: _kl(t, s),
    "reverse_kl": lambda s, t, _: _kl(s, t),
    "jsd": _jsd,
    "jsd_normalized": lambda s, t, b: _jsd(s, t, b) / b / (1 - b),
    "skew_forward_kl": lambda s, t, a: _kl(t, _mix(a, t, s)),
    "skew_reverse_kl": lambda s, t, a: _kl(s, _mix(1 - a, t, s)),
    "mixed_kl": lambda s, t, w: w * _kl(t, s) + (1 - w) * _kl(s, t),
    "alpha": lambda s, t, a: (
        (1 - sum(y**a * x ** (1 - a) for x, y in zip(s, t, strict=True))) / (a * (1 - a))
    ),
    "tvd": lambda s, t, _: sum(abs(y - x) for x, y in zip(s, t, strict=True)) / 2,
    "adaptive_kl": _akl,
    "density_power": lambda s, t, a: sum(
        (x ** (1 + a) - y ** (1 + a)) / (a * (1 + a)) - y**a * (x - y) / a
        for x, y in zip(s, t, strict=True)
    ),
    # The weights T / (T + S) and S / (T + S) make Jeffreys' divergence of it, in value but not in gradient.
    "todi": lambda s, t, _: sum((y - x) * math.log(y / x) for x, y in zip(s, t, strict=True)),
    "ce": lambda s, t, _: -sum(y * math.log(x) for x, y in zip(s, t, strict=True)),
    "mse": _mse,
}


def slow_twin(divergence, parameter, student, teacher):
    if divergence.name in TWINS:
        s, t = logp(student).exp().tolist(), logp(teacher).exp().tolist()
        twin = [TWINS[divergence.name](a, b, parameter) for a, b in zip(s, t, strict=True)]
        close(
            divergence.value(logp(student), logp(teacher), parameter),
            torch.tensor(twin, dtype=torch.float64),
            1e-9,
        )


def slope_is_the_derivative(divergence, parameter, student, teacher):
    """In closed form as by autograd, up to a multiple of S that no gradient of logits sees; inputs stay as they are."""
    if divergence.slope is None:
        return
    resolved = divergence.resolve(parameter)
    for s, t in (
        (logp(student), logp(teacher)),
        (logp(student), logp(student + 0.1 * teacher)),
        (logp(40 * student), logp(teacher)),
    ):
        pair = DistributionPair(s, s.exp(), t, t.exp())
        before = [tensor.clone() for tensor in (s, pair.student_probs, t, pair.teacher_probs)]
        slope = torch.full_like(s, math.nan)
        value = divergence.slope(pair, resolved, slope, torch.full_like(s, math.nan))
        torch.testing.assert_close(value, divergence.value(s, t, parameter), rtol=1e-9, atol=1e-12)
        in_logits = slope - s.exp() * slope.sum(-1, keepdim=True)
        leaf = s.clone().requires_grad_()
        expected = gradient(lambda x, other=t: divergence.value(x, other, parameter), leaf)
        torch.testing.assert_close(in_logits, expected, rtol=1e-9, atol=1e-12)
        for tensor, old in zip((s, pair.student_probs, t, pair.teacher_probs), before, strict=True):
            assert torch.equal(tensor, old)


LAWS = [
    zero_at_equality,
    non_negative,
    gradient_is_of_the_value,
    order_of_the_vocabulary,
    sharp_stays_finite,
    impossible_stays_finite,
    mirror,
    limits,
    bounds,
    sampled_expectation,
    head_and_sampled_tail,
    advantage_in_float32,
    all_candidates_are_the_whole,
    bucket_is_a_lower_bound,
    slope_is_the_derivative,
    slow_twin,
]
