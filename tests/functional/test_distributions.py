"""Distributions: supports, tails, and the algebra of targets."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum import functional as F
from practicum.functional.divergences import DIVERGENCES

from .divergence_laws import close, gradient, logp, random_logits


def three(seed, **shape):
    return random_logits(seed, count=3, **shape)


def test_entropy_by_hand():
    logprobs = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]).log()
    assert F.entropy(logprobs).tolist() == pytest.approx([1.5 * math.log(2), 0.0])
    assert F.entropy(torch.zeros(8).log_softmax(-1)).item() == pytest.approx(math.log(8))


def test_entropy_gradient_is_finite_with_impossible_tokens():
    logits = torch.tensor([0.3, -math.inf, 1.0], requires_grad=True)
    F.entropy(logp(logits)).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@given(st.integers(0, 10**6), st.floats(0.2, 5.0))
def test_temperature_is_a_log_linear_coefficient(seed, temperature):
    (logits,) = random_logits(seed, count=1)
    tempered = F.temper(logp(logits), temperature)
    torch.testing.assert_close(tempered, logp(logits / temperature))
    torch.testing.assert_close(tempered, F.log_linear([(1 / temperature, logp(logits))]))
    torch.testing.assert_close(F.temper(logp(logits), 1.0), logp(logits))


def test_log_linear_and_impossible_tokens():
    a = torch.tensor([0.5, 0.5, 0.0]).log()
    b = torch.tensor([0.2, 0.3, 0.5]).log()
    torch.testing.assert_close(F.log_linear([(0.0, a), (1.0, b)]), b)
    assert F.log_linear([(0.5, a), (0.5, b)])[2].item() == -math.inf
    assert F.log_linear([(-0.5, a), (1.5, b)])[2].item() == -math.inf
    assert F.log_linear([(-0.5, a), (1.5, b)]).exp().sum().item() == pytest.approx(1.0)


def test_mixture_by_hand():
    a = torch.tensor([1.0, 0.0, 0.0]).log()
    b = torch.tensor([0.5, 0.5, 0.0]).log()
    torch.testing.assert_close(
        F.mixture([(0.25, a), (0.75, b)]).exp(), torch.tensor([0.625, 0.375, 0.0])
    )
    torch.testing.assert_close(F.mixture([(1.0, b), (0.0, a)]), b)
    assert F.mixture([(0.25, a), (0.75, b)])[2].item() == -math.inf


@given(st.integers(0, 10**6))
def test_pools(seed):
    """Many teachers are one: the geometric pool under reverse KL, the arithmetic pool under forward KL."""
    student, first, second = three(seed)
    parts = [(0.3, logp(first)), (0.7, logp(second))]
    geometric, arithmetic = F.log_linear(parts), F.mixture(parts)
    for kl, pool in ((F.reverse_kl, geometric), (F.forward_kl, arithmetic)):
        gap = sum(w * kl(logp(student), t) for w, t in parts) - kl(logp(student), pool)
        elsewhere = sum(w * kl(logp(-student), t) for w, t in parts) - kl(logp(-student), pool)
        torch.testing.assert_close(gap, elsewhere)  # a constant of the student
        close(
            gradient(lambda s, kl=kl: sum(w * kl(s, t) for w, t in parts), student),
            gradient(lambda s, kl=kl, pool=pool: kl(s, pool), student),
        )


@given(st.integers(0, 10**6), st.floats(0.0, 3.0))
def test_reward_extrapolation_is_a_log_linear_target(seed, strength):
    """G-OPD's advantage `c (lT - lref) - (lS - lref)` is reverse KL to ref^(1-c) T^c."""
    student, teacher, reference = (logp(logits) for logits in three(seed))
    advantage = strength * (teacher - reference) - (student - reference)
    target = F.log_linear([(strength, teacher), (1 - strength, reference)])
    sampled = gradient(lambda s: -(student.exp() * advantage * s).sum(-1), student)
    close(sampled, gradient(lambda s: F.reverse_kl(s, target), student), rel=1e-11)
    if strength == 1.0:
        close(target, teacher)


@given(st.integers(0, 10**6), st.floats(0.1, 0.9))
def test_bridge_to_the_student_is_an_entropy_discount(seed, beta):
    """Veto: reverse KL to T S^beta, S held constant, is CE(S, T) - (1 - beta) H(S); its optimum is T^(1/(1-beta))."""
    student, teacher = random_logits(seed)
    bridge = F.log_linear([(1.0, logp(teacher)), (beta, logp(student))])
    veto = gradient(lambda s: F.reverse_kl(s, bridge), student)
    direct = gradient(
        lambda s: -(s.exp() * logp(teacher)).sum(-1) - (1 - beta) * F.entropy(s), student
    )
    close(veto, direct, rel=1e-11)
    optimum = F.temper(logp(teacher), 1 - beta)
    bridge = F.log_linear([(1.0, logp(teacher)), (beta, optimum)])
    assert gradient(lambda s: F.reverse_kl(s, bridge), optimum).abs().max() < 1e-12


def test_candidates_by_hand():
    student = torch.tensor([[0.0, -1.0, -2.0, -3.0]])
    teacher = torch.tensor([[-3.0, -1.0, 0.0, -2.0]])
    ids, valid = F.candidates(student, teacher, 2, "student")
    assert ids.tolist() == [[0, 1]]
    assert valid.all()
    assert F.candidates(student, teacher, 2, "teacher")[0].tolist() == [[2, 1]]
    ids, valid = F.candidates(student, teacher, 2, "union")
    assert ids.tolist() == [[0, 1, 2, 1]]
    assert valid.tolist() == [[True, True, True, False]]
    ids, valid = F.candidates(student, teacher, 2, "intersection")
    assert ids.tolist() == [[0, 1]]
    assert valid.tolist() == [[False, True]]
    assert F.candidates(student, teacher, 9, "teacher")[0].shape == (1, 4)
    assert F.candidates(student, teacher, 9, "union")[0].shape == (1, 8)


@given(st.integers(0, 10**6), st.integers(1, 8), st.sampled_from(F.SUPPORTS))
def test_candidates_are_the_set_they_name(seed, k, support):
    student, teacher = random_logits(seed, positions=3, vocabulary=6)
    ids, valid = F.candidates(student, teacher, k, support)
    for row in range(3):
        tops = [
            set(logits[row].argsort(descending=True)[:k].tolist()) for logits in (student, teacher)
        ]
        expected = {
            "student": tops[0],
            "teacher": tops[1],
            "union": tops[0] | tops[1],
            "intersection": tops[0] & tops[1],
        }
        chosen = ids[row][valid[row]].tolist()
        assert len(chosen) == len(set(chosen))
        assert set(chosen) == expected[support]


@given(
    st.integers(0, 10**6),
    st.sampled_from(F.SUPPORTS),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_tails(seed, support, dtype):
    student, teacher = (logp(logits).to(dtype) for logits in random_logits(seed, vocabulary=7))
    ids, valid = F.candidates(student, teacher, 3, support)
    inside = torch.zeros(student.shape).scatter_add(-1, ids, valid.float()) > 0
    drop = F.restrict(student, ids, valid, "drop")
    torch.testing.assert_close(drop.exp().sum(-1), (student.exp() * inside).sum(-1))
    assert torch.equal(torch.isneginf(drop), ~valid)
    assert torch.equal(drop, F.restrict(student, ids, valid, "sampled"))
    bucket = F.restrict(student, ids, valid, "bucket")
    assert bucket.shape[-1] == ids.shape[-1] + 1
    torch.testing.assert_close(bucket.exp().sum(-1), torch.ones(len(student), dtype=dtype))
    torch.testing.assert_close(bucket[:, -1].exp(), (student.exp() * ~inside).sum(-1))
    renorm = F.restrict(student, ids, valid, "renorm")
    some = valid.any(-1)
    torch.testing.assert_close(renorm.exp().sum(-1), some.to(dtype))
    known = student.gather(-1, ids)
    for tail in F.TAILS:
        assert torch.equal(
            F.restrict_candidates(known, valid, tail), F.restrict(student, ids, valid, tail)
        )


@pytest.mark.parametrize("tail", F.TAILS)
@pytest.mark.parametrize("name", list(DIVERGENCES))
def test_gradient_is_finite_without_any_candidate(tail, name):
    """Check an empty intersection: nothing is known about the position, and nothing breaks."""
    student, teacher = random_logits(1, positions=2)
    ids, valid = torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, dtype=torch.bool)
    part = F.restrict(logp(teacher), ids, valid, tail)

    def value(s):
        return DIVERGENCES[name].value(F.restrict(s, ids, valid, tail), part)

    assert value(logp(student)).abs().max() < 1e-12
    assert gradient(value, student).abs().max() < 1e-12


def test_tail_mass_is_stable():
    """Check that a tail too small for float32 becomes the documented smallest tail, with a finite gradient."""
    logits = torch.tensor([[30.0, 0.0, -1.0, -2.0]], requires_grad=True)
    ids, valid = torch.tensor([[0]]), torch.tensor([[True]])
    tail = F.restrict(logp(logits), ids, valid, "bucket")[0, 1]
    assert tail.item() == pytest.approx(math.log(1e-7), rel=1e-4)
    tail.backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    rest = F.restrict(
        torch.tensor([[1e-6, 1 - 1e-6]], dtype=torch.float64).log(),
        torch.tensor([[1]]),
        valid,
        "bucket",
    )
    assert rest[0, 1].item() == pytest.approx(math.log(1e-6), rel=1e-9)
    little = F.restrict(
        torch.tensor([[1e-9, 1 - 1e-9]], dtype=torch.float64).log(),
        torch.tensor([[0]]),
        valid,
        "bucket",
    )
    assert little[0, 1].item() == pytest.approx(-1e-9, rel=1e-6)


def test_the_whole_vocabulary_leaves_an_empty_tail():
    student = logp(random_logits(2, count=1)[0])
    ids, valid = F.candidates(student, student, 99, "union")
    assert torch.isneginf(F.restrict(student, ids, valid, "bucket")[:, -1]).all()
    # The candidates by themselves do not show that they are complete.
    assert F.restrict_candidates(student, torch.ones_like(student, dtype=torch.bool), "bucket")[
        0, -1
    ].isfinite()


def test_padding_ids_of_invalid_candidates_are_not_read():
    student = logp(random_logits(3, count=1)[0])
    ids, valid = torch.tensor([[0, -1]] * 4), torch.tensor([[True, False]] * 4)
    assert torch.isneginf(F.restrict(student, ids, valid, "drop")[:, 1]).all()


def test_half_precision_is_computed_in_float32():
    half = logp(random_logits(4, count=1)[0]).half()
    ids, valid = F.candidates(half, half, 2, "student")
    for result in (
        F.entropy(half),
        F.temper(half, 0.5),
        F.log_linear([(1.0, half)]),
        F.mixture([(1.0, half)]),
        F.restrict(half, ids, valid, "bucket"),
        F.gather_logprobs(half, ids[:, 0]),
    ):
        assert result.dtype == torch.float32


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda p: F.temper(p, 0.0), r"temperature must be positive, got 0\.0"),
        (lambda p: F.log_linear([]), "log_linear needs at least one part"),
        (lambda p: F.mixture([]), r"mixture weights must be non-negative and sum to 1, got \[\]"),
        (lambda p: F.mixture([(0.5, p), (0.6, p)]), r"sum to 1, got \[0\.5, 0\.6\]"),
        (lambda p: F.mixture([(-0.5, p), (1.5, p)]), "non-negative"),
        (
            lambda p: F.candidates(p, p, 2, "both"),
            "no support named 'both'; known: student, teacher, union, intersection",
        ),
        (lambda p: F.candidates(p, p, 0, "student"), "k must be at least 1, got 0"),
        (
            lambda p: F.restrict(
                p, torch.zeros(4, 1, dtype=torch.long), torch.ones(4, 1, dtype=torch.bool), "cut"
            ),
            "no tail named 'cut'; known: bucket, renorm, drop, sampled",
        ),
    ],
)
def test_errors(call, text):
    with pytest.raises(ValueError, match=text):
        call(logp(random_logits(5, count=1)[0]))


def test_overlap_of_likeliest_tokens_by_counting():
    student = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    teacher = torch.tensor([0.1, 0.3, 0.2, 0.4]).log()
    ratio, mass = F.overlap(student, teacher, 2)
    assert (ratio.item(), mass.item()) == (pytest.approx(0.5), pytest.approx(0.3))
    assert [value.item() for value in F.overlap(student, student, 9)] == pytest.approx([1.0, 1.0])
