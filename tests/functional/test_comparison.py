"""The comparison of two distributions: its laws, against a slow twin, for any division into chunks."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum import functional as F
from practicum.functional.chunked import chunks
from practicum.functional.comparison import MEASURES, compare

from .divergence_laws import logp, random_logits

SEEDS, SIZES = st.integers(0, 10**6), st.integers(1, 9)
POSITIONS, VOCABULARY, K = 7, 6, 3


def pair(seed):
    student, teacher = random_logits(seed, POSITIONS, VOCABULARY)
    tokens = torch.randint(VOCABULARY, (POSITIONS,), generator=torch.Generator().manual_seed(seed))
    return logp(student), logp(teacher), tokens


def by_enumeration(student, teacher, token):
    """Compute every measure of one position, from two lists of log-probabilities."""
    probabilities = [(math.exp(s), math.exp(t)) for s, t in zip(student, teacher, strict=True)]
    top_tokens = [
        sorted(range(VOCABULARY), key=side.__getitem__, reverse=True)[:K]
        for side in (student, teacher)
    ]
    both = set(top_tokens[0]) & set(top_tokens[1])
    return {
        "student_logprobs": student[token],
        "teacher_logprobs": teacher[token],
        "student_entropy": -sum(p * math.log(p) for p, _ in probabilities),
        "teacher_entropy": -sum(q * math.log(q) for _, q in probabilities),
        "student_top_ids": top_tokens[0],
        "student_top_logprobs": [student[place] for place in top_tokens[0]],
        "teacher_top_ids": top_tokens[1],
        "teacher_top_logprobs": [teacher[place] for place in top_tokens[1]],
        "reverse_kl": sum(p * math.log(p / q) for p, q in probabilities),
        "forward_kl": sum(q * math.log(q / p) for p, q in probabilities),
        "overlap": len(both) / K,
        "student_mass": sum(probabilities[place][0] for place in both),
        "teacher_mass": sum(probabilities[place][1] for place in both),
    }


@given(SEEDS)
def test_every_measure_is_that_of_its_slow_twin(seed):
    student, teacher, tokens = pair(seed)
    rows = [
        by_enumeration(*position)
        for position in zip(student.tolist(), teacher.tolist(), tokens.tolist(), strict=True)
    ]
    known = compare([(student, teacher, tokens)], MEASURES, K).known()
    assert set(known) == set(MEASURES) == set(rows[0])
    for name, values in known.items():
        expected = torch.tensor([row[name] for row in rows], dtype=values.dtype)
        torch.testing.assert_close(values, expected, rtol=1e-9, atol=1e-12, msg=name)


@given(SEEDS)
def test_divergences_are_not_negative_and_shares_lie_between_0_and_1(seed):
    student, teacher, tokens = pair(seed)
    compared = compare([(student, teacher, tokens)], MEASURES, K)
    assert (compared.reverse_kl > 0).all() and (compared.forward_kl > 0).all()
    for share in (compared.overlap, compared.student_mass, compared.teacher_mass):
        assert (share >= 0).all() and (share <= 1 + 1e-12).all()


@given(SEEDS)
def test_equal_distributions_are_at_no_distance_and_share_all(seed):
    student, _, tokens = pair(seed)
    known = compare([(student, student, tokens)], MEASURES, K).known()
    assert not known["reverse_kl"].any() and not known["forward_kl"].any()
    assert (known["overlap"] == 1).all()
    for name, values in known.items():
        if name.startswith("student_"):
            assert torch.equal(values, known[name.replace("student", "teacher")])


@given(SEEDS)
def test_exchanged_roles_exchange_the_measures(seed):
    student, teacher, tokens = pair(seed)
    known, back = (
        compare([(*sides, tokens)], MEASURES, K).known()
        for sides in ((student, teacher), (teacher, student))
    )
    other = {"reverse_kl": "forward_kl", "forward_kl": "reverse_kl", "overlap": "overlap"}
    for name, values in known.items():
        whose, _, what = name.partition("_")
        twin = other.get(name) or f"{'teacher' if whose == 'student' else 'student'}_{what}"
        torch.testing.assert_close(values, back[twin], rtol=1e-12, atol=1e-12, msg=name)


@given(SEEDS, SIZES)
def test_how_the_tokens_are_cut_changes_nothing(seed, size):
    student, teacher, tokens = pair(seed)
    parts = ((student[part], teacher[part], tokens[part]) for part in chunks(POSITIONS, size))
    known, whole = (
        compare(them, MEASURES, K).known() for them in (parts, [(student, teacher, tokens)])
    )
    assert all(torch.equal(known[name], whole[name]) for name in MEASURES)


def test_what_is_not_asked_for_or_not_known_is_none():
    student, teacher, tokens = pair(0)
    assert set(compare([(student, teacher, tokens)], ("overlap",), K).known()) == {"overlap"}
    alone = compare([(student, None, tokens)], MEASURES, K).known()
    assert set(alone) == {
        "student_logprobs",
        "student_entropy",
        "student_top_ids",
        "student_top_logprobs",
    }
    assert compare([(None, None, tokens)], MEASURES, K).known() == {}
    with pytest.raises(ValueError, match="no measure named 'kl'; known: student_logprobs, "):
        compare([(student, teacher, tokens)], ("kl",))


def test_of_no_tokens_the_measures_are_empty():
    student, teacher, tokens = (tensor[:0] for tensor in pair(0))
    assert all(
        len(values) == 0
        for values in compare([(student, teacher, tokens)], MEASURES, K).known().values()
    )


@given(SEEDS)
def test_impossible_tokens_leave_it_finite(seed):
    student, teacher, tokens = pair(seed)
    one, other = (
        logp(side.masked_fill(torch.arange(VOCABULARY) % 3 == place, -math.inf))
        for side, place in ((student, 1), (teacher, 2))
    )
    compared = compare(
        [(one, other, tokens)], ("reverse_kl", "forward_kl", "student_entropy", "student_mass"), K
    )
    assert all(values.isfinite().all() for values in compared.known().values())


@given(SEEDS)
def test_the_overlap_is_the_one_of_the_public_function(seed):
    student, teacher, tokens = pair(seed)
    compared = compare([(student, teacher, tokens)], ("overlap", "student_mass"), 2 * VOCABULARY)
    share, mass = F.overlap(student, teacher, 2 * VOCABULARY)
    assert torch.equal(compared.overlap, share) and torch.equal(compared.student_mass, mass)
