"""Every law, for every entry of the table, at asymmetric parameters."""

import inspect
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from practicum import functional as F
from practicum.functional.divergences import DIVERGENCES, TEACHER_FLOOR

from .divergence_laws import LAWS, TWINS, gradient, logp, random_logits

CASES = [
    pytest.param(entry, parameter, id=name if parameter is None else f"{name}-{parameter}")
    for name, entry in DIVERGENCES.items()
    for parameter in ([None] if entry.parameter is None else [0.2, 0.7])
]
EVERY = pytest.mark.parametrize(
    "entry", [pytest.param(entry, id=name) for name, entry in DIVERGENCES.items()]
)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize(("entry", "parameter"), CASES)
def test_law(law, entry, parameter):
    @settings(max_examples=3)
    @given(st.integers(0, 10**6), st.integers(3, 8), st.sampled_from([0.5, 1.5, 3.0]))
    def holds(seed, vocabulary, scale):
        law(entry, parameter, *random_logits(seed, vocabulary=vocabulary, scale=scale))

    holds()


@EVERY
def test_public_function_is_the_table_entry(entry):
    student, teacher = (logp(logits) for logits in random_logits(3))
    function = getattr(F, entry.name)
    assert function.__doc__
    assert "." in entry.paper
    torch.testing.assert_close(function(student, teacher), entry.value(student, teacher))
    names = list(inspect.signature(function).parameters)
    assert names[:2] == ["student", "teacher"]
    if entry.parameter is not None:
        assert names[2:] == [entry.parameter.name]
        assert inspect.signature(function).parameters[names[2]].default == entry.parameter.default
        torch.testing.assert_close(
            function(student, teacher, 0.3), entry.value(student, teacher, 0.3)
        )


@EVERY
def test_half_precision_is_computed_in_float32(entry):
    student, teacher = (logp(logits).bfloat16() for logits in random_logits(4))
    value = entry.value(student, teacher)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, entry.value(student.float(), teacher.float()))


@EVERY
def test_any_leading_shape(entry):
    student, teacher = (logp(logits) for logits in random_logits(5, positions=6))
    value = entry.value(student, teacher)
    torch.testing.assert_close(
        entry.value(student.view(2, 3, -1), teacher.view(2, 3, -1)).flatten(), value
    )
    torch.testing.assert_close(entry.value(student[0], teacher[0]), value[0])


def test_every_entry_has_a_twin():
    assert set(TWINS) == set(DIVERGENCES)


def test_two_outcomes_by_hand():
    student = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    teacher = torch.tensor([0.75, 0.25], dtype=torch.float64).log()
    # KL(T||S) = .75 ln 1.5 + .25 ln .5 and KL(S||T) = .5 ln (2/3) + .5 ln 2
    assert F.forward_kl(student, teacher).item() == pytest.approx(0.13081203594113697)
    assert F.reverse_kl(student, teacher).item() == pytest.approx(0.14384103622589045)
    assert F.tvd(student, teacher).item() == pytest.approx(0.25)
    assert F.density_power(student, teacher, 1.0).item() == pytest.approx(0.0625)
    assert F.ce(student, teacher).item() == pytest.approx(math.log(2))
    assert F.mixed_kl(student, teacher, 0.25).item() == pytest.approx(
        0.25 * 0.130812036 + 0.75 * 0.143841036
    )
    # M = .25 T + .75 S = (.5625, .4375)
    by_hand = 0.25 * (0.75 * math.log(0.75 / 0.5625) + 0.25 * math.log(0.25 / 0.4375))
    by_hand += 0.75 * (0.5 * math.log(0.5 / 0.5625) + 0.5 * math.log(0.5 / 0.4375))
    assert F.jsd(student, teacher, 0.25).item() == pytest.approx(by_hand)


def test_known_gradients():
    student, teacher = random_logits(6)
    s, t = logp(student), logp(teacher)
    torch.testing.assert_close(gradient(lambda x: F.forward_kl(x, t), student), s.exp() - t.exp())
    reverse = s.exp() * (s - t - F.reverse_kl(s, t)[:, None])
    torch.testing.assert_close(gradient(lambda x: F.reverse_kl(x, t), student), reverse)
    torch.testing.assert_close(gradient(lambda x: F.ce(x, t), student), s.exp() - t.exp())


def test_closed_advantages():
    """Check the derived advantages against the closed forms."""
    student, teacher = (logp(logits) for logits in random_logits(7))
    r, a, beta = (teacher - student).exp(), 0.3, 0.2
    m = (1 - a) * r + a
    closed = [
        ("reverse_kl", None, r.log()),
        ("forward_kl", None, r - 1),
        ("ce", None, r - 1),
        ("jsd_normalized", beta, (1 - beta + beta * r).log() / beta),
        ("jsd", beta, (1 - beta) * (1 - beta + beta * r).log()),
        ("skew_forward_kl", a, (1 - a) * r / (a * r + 1 - a) - (1 - a)),
        ("skew_reverse_kl", a, m.log() + a / m - a),
        ("mixed_kl", a, a * (r - 1) + (1 - a) * r.log()),
        ("alpha", a, (r**a - 1) / a),
        ("tvd", None, 0.5 * torch.sign(r - 1)),
        ("density_power", a, ((a * teacher).exp() - (a * student).exp()) / a),
    ]
    for name, parameter, expected in closed:
        actual = DIVERGENCES[name].advantage(student, teacher, parameter)
        torch.testing.assert_close(
            actual, expected, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )
    torch.testing.assert_close(
        DIVERGENCES["reverse_kl"].tail_coefficient(student, teacher),
        student - teacher + 1,
        rtol=1e-12,
        atol=1e-12,
    )


def test_advantage_is_detached_wherever_it_is_computed():
    student, teacher = (logp(logits).requires_grad_() for logits in random_logits(8))
    entry = DIVERGENCES["jsd"]
    with torch.no_grad():
        expected = entry.advantage(student, teacher, 0.2)
    assert not entry.advantage(student, teacher, 0.2).requires_grad
    with torch.inference_mode():
        inside = entry.advantage(student.detach() * 1.0, teacher.detach() * 1.0, 0.2)
        torch.testing.assert_close(inside, expected)


def test_teacher_floor():
    student = torch.tensor([[0.5, 0.5], [1.0, 0.0]]).log()
    teacher = torch.tensor([[0.0, TEACHER_FLOOR]])
    floored = F.reverse_kl(student, torch.tensor([[0.0, -math.inf]]).expand(2, 2))
    torch.testing.assert_close(floored, F.reverse_kl(student, teacher.expand(2, 2)))
    assert floored[0].item() == pytest.approx(math.log(0.5) - 0.5 * TEACHER_FLOOR)
    assert floored[1].item() == 0.0
    low = torch.tensor([-80.0])
    assert DIVERGENCES["reverse_kl"].advantage(low, torch.tensor([-40.0])).item() == pytest.approx(
        40.0
    )
    assert DIVERGENCES["reverse_kl"].advantage(low, low).item() == 0.0


def test_families_in_float32_near_their_ends():
    """Check that small parameters keep their digits: float32 agrees with float64."""
    student, teacher = (
        logp(logits) for logits in random_logits(9, positions=50, vocabulary=40, scale=3.0)
    )
    for name in ("jsd_normalized", "skew_forward_kl", "skew_reverse_kl", "alpha", "density_power"):
        double = DIVERGENCES[name].value(student, teacher, 1e-4)
        single = DIVERGENCES[name].value(student.float(), teacher.float(), 1e-4)
        torch.testing.assert_close(single.double(), double, rtol=3e-3, atol=1e-4)


def test_adaptive_weight_is_held_constant():
    student, teacher = random_logits(10, positions=1)
    s, t = logp(student), logp(teacher)
    forward, reverse = F.forward_kl(s, t), F.reverse_kl(s, t)
    w = ((F.adaptive_kl(s, t) - reverse) / (forward - reverse)).item()
    expected = gradient(lambda x: F.mixed_kl(x, t, w), student)
    torch.testing.assert_close(gradient(lambda x: F.adaptive_kl(x, t), student), expected)


def test_speculative_decoding_accepts_one_minus_tvd():
    """Check a decoder that drafts from S, accepts v with min(1, T/S) and else draws from the residual, by enumeration."""
    student, teacher = (logp(logits)[0].exp() for logits in random_logits(11))
    residual = (teacher - student).clamp(min=0)
    residual = residual / residual.sum()
    accepted, output = 0.0, torch.zeros_like(teacher)
    for v in range(len(student)):
        accept = min(1.0, (teacher[v] / student[v]).item())
        accepted += student[v].item() * accept
        output[v] += student[v] * accept
        output += student[v] * (1 - accept) * residual
    torch.testing.assert_close(output, teacher)
    assert accepted == pytest.approx(1 - F.tvd(student.log(), teacher.log()).item(), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "parameter", "text"),
    [
        (
            "jsd",
            0.0,
            r"jsd: beta must be in \(0, 1\) \(weight of the teacher in the mixture\), got 0",
        ),
        ("jsd", 1.5, r"got 1\.5"),
        ("jsd_normalized", -0.1, r"beta must be in \[0, 1\]"),
        ("skew_forward_kl", 1.0, r"alpha must be in \[0, 1\)"),
        ("skew_reverse_kl", 1.0, r"alpha must be in \[0, 1\)"),
        ("mixed_kl", 1.01, r"w must be in \[0, 1\]"),
        (
            "alpha",
            0.0,
            r"alpha: alpha must be in \(0, 1\) \(1 tends to forward_kl, 0 to reverse_kl: write those\)",
        ),
        ("alpha", 1.0, r"write those"),
        ("density_power", 0.0, r"alpha must be in \(0, inf\)"),
        ("density_power", math.inf, r"got inf"),
        ("jsd", math.nan, r"got nan"),
        ("reverse_kl", 0.5, r"reverse_kl takes no parameter, got 0\.5"),
    ],
)
def test_parameters_are_checked(name, parameter, text):
    student, teacher = (logp(logits) for logits in random_logits(12))
    with pytest.raises(ValueError, match=text):
        DIVERGENCES[name].value(student, teacher, parameter)


@pytest.mark.parametrize("name", ["adaptive_kl", "mse"])
def test_no_sampled_form(name):
    with pytest.raises(
        ValueError,
        match=rf"{name} depends on the whole distribution .* use one of forward_kl, reverse_kl",
    ):
        DIVERGENCES[name].advantage(torch.zeros(2), torch.zeros(2))


def _swapped(term):
    return lambda student, teacher, parameter: term(teacher, student, parameter)


def _reflected(term):
    return lambda student, teacher, parameter: term(student, teacher, 1.0 - parameter)


def _detached(term):
    """Return half of the gradient, with the right value."""
    return lambda student, teacher, parameter: (
        0.5 * (term(student, teacher, parameter) + term(student.detach(), teacher, parameter))
    )


def _averaged(term):
    return lambda student, teacher, parameter: term(student, teacher, parameter) / student.shape[-1]


def _entropy_dropped(term):
    return lambda student, teacher, _: -teacher.exp() * student


DIRECTED = ("forward_kl", "reverse_kl", "skew_forward_kl", "skew_reverse_kl", "density_power")
WEIGHTED = ("jsd", "jsd_normalized", "mixed_kl", "alpha")
MUTANTS = [
    *((name, _reflected) for name in WEIGHTED),
    *((name, fault) for name in WEIGHTED + DIRECTED for fault in (_swapped, _detached, _averaged)),
    ("forward_kl", _entropy_dropped),
]


@pytest.mark.slow
@pytest.mark.parametrize("twin", [True, False], ids=["all laws", "without the twin"])
@pytest.mark.parametrize(
    ("name", "fault"),
    MUTANTS,
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_fault_is_caught(name, fault, twin):
    """Check the tests themselves: each deliberate fault breaks at least one law, even without the textbook formula."""
    entry = DIVERGENCES[name]
    mutant = replace(entry, term=fault(entry.term))
    parameter = None if entry.parameter is None else 0.2
    broken = []
    for law in LAWS:
        try:
            law(mutant, parameter, *random_logits(13))
        except (AssertionError, RuntimeError):
            broken.append(law.__name__)
    assert set(broken) - (set() if twin else {"slow_twin"}), (
        f"no law notices {fault.__name__} in {name}"
    )
