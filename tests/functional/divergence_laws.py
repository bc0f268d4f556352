"""Laws of single families of divergences; the laws of the package hold for every entry.

Each law takes a divergence, a parameter, and logits of student and teacher in float64, and asserts.
"""

import math

import torch

from practicum.functional.divergences import DIVERGENCES
from practicum.functional.laws import DIVERGENCE_LAWS
from practicum.functional.laws.requirements import differentiate as gradient
from practicum.functional.laws.requirements import normalize as logp
from practicum.functional.laws.requirements import random_logits

__all__ = ["LAWS", "TWINS", "close", "gradient", "logp", "random_logits"]


def close(a, b, rel=1e-12):
    """Assert relative closeness of whole tensors, as the identities of gradients are stated."""
    error = (a - b).norm() / b.norm().clamp(min=1e-9)
    assert error <= rel, f"relative error {error:.2e} above {rel:.0e}"


def mirror(divergence, parameter, student, teacher):
    """Check the reverse direction of each family: forward(p, q) = reverse(q, p)."""
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
    # family, parameter, divisor of the value, the divergence in the limit
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
    # Check the textbook formulas, in probabilities and plain loops.
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
    # The weights T / (T + S) and S / (T + S) turn it into Jeffreys' divergence, in value but not in gradient.
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


LAWS = [*DIVERGENCE_LAWS, mirror, limits, bounds, slow_twin]
