"""Sorted probabilities of two vocabularies: by loops, under renamed tokens, and the requirements on a teacher."""

import itertools

import pytest
import torch

from practicum.errors import TeacherError
from practicum.functional.divergences import DIVERGENCES
from practicum.functional.sorting import sorted_l1
from practicum.objective import Objective, TeacherDistribution
from tests.losses.vocabularies import (
    COMMON,
    OUTSIDE,
    OWN,
    STUDENT_SIZE,
    TEACHER_SIZE,
    compare,
    logits,
    signal_of,
)

SORTED = Objective.model_validate({"signal": "sorted"}).losses[0]
MATCHED = Objective.model_validate(
    {"signal": "sorted(matched=true)", "divergence": "jsd(0.3)"}
).losses[0]


OWN_TOKENS = [token for token in range(TEACHER_SIZE) if token not in COMMON]


def pair() -> tuple[torch.Tensor, TeacherDistribution, torch.Tensor]:
    """Return a student with a gradient, a teacher's signal with its own tokens, and its log-probabilities."""
    student = logits(0, STUDENT_SIZE, 0.0).requires_grad_()
    teacher = logits(1, TEACHER_SIZE, 0.0).log_softmax(-1)
    tokens = torch.zeros(len(student), dtype=torch.long)
    signal = signal_of(teacher, tokens)
    own = TeacherDistribution(
        full=signal.full, outside=OUTSIDE, unknown=signal.unknown, own=teacher[:, OWN_TOKENS]
    )
    return student, own, teacher


def rank_slowly(one: list[float], other: list[float]) -> float:
    ranks = itertools.zip_longest(
        sorted(one, reverse=True), sorted(other, reverse=True), fillvalue=0.0
    )
    return sum(abs(a - b) for a, b in ranks)


def test_it_is_the_distance_of_two_sorted_lists() -> None:
    student, signal, teacher = pair()
    values = compare(SORTED, student.log_softmax(-1), signal)
    probs, others = student.softmax(-1).tolist(), teacher.exp().tolist()
    slow = [rank_slowly(*rows) for rows in zip(probs, others, strict=True)]
    torch.testing.assert_close(values, torch.tensor(slow, dtype=torch.float64))


def test_matched_tokens_have_the_weight_of_their_share_of_the_vocabulary() -> None:
    student, signal, teacher = pair()
    values = compare(MATCHED, student.log_softmax(-1), signal)
    logprobs = student.log_softmax(-1).detach()
    same = DIVERGENCES["jsd"].contributions(logprobs[:, COMMON], teacher[:, COMMON], 0.3).sum(-1)
    probs = logprobs[:, OUTSIDE].exp().tolist()
    others = [
        rank_slowly(*rows)
        for rows in zip(probs, teacher[:, OWN_TOKENS].exp().tolist(), strict=True)
    ]
    weight = len(COMMON) / TEACHER_SIZE
    slow = weight * same + (1 - weight) * torch.tensor(others, dtype=torch.float64)
    torch.testing.assert_close(values.detach(), slow)


@pytest.mark.parametrize("term", [SORTED, MATCHED], ids=["sorted", "matched"])
def test_its_gradient_is_that_of_small_changes(term) -> None:
    student, signal, _ = pair()
    small = student.detach()[:3].requires_grad_()
    part = TeacherDistribution(
        full=signal.full[:3], outside=OUTSIDE, unknown=None, own=signal.own[:3]
    )
    assert torch.autograd.gradcheck(lambda raw: compare(term, raw.log_softmax(-1), part), (small,))


def test_no_renaming_of_the_teachers_tokens_is_seen() -> None:
    student, _, teacher = pair()
    order = torch.randperm(TEACHER_SIZE, generator=torch.Generator().manual_seed(0))
    one, other = (sorted_l1(student, tokens) for tokens in (teacher, teacher[:, order]))
    torch.testing.assert_close(one, other)


def test_one_vocabulary_needs_no_tokens_apart() -> None:
    student, teacher = (logits(seed, 9, 0.0).log_softmax(-1) for seed in (0, 1))
    signal = TeacherDistribution(full=teacher)
    assert compare(SORTED, student, signal).equal(sorted_l1(student, teacher))
    plain = DIVERGENCES["jsd"].contributions(student, teacher, 0.3).sum(-1)
    assert compare(MATCHED, student, signal).equal(plain)


def test_a_teacher_whose_own_tokens_are_one_sum_is_refused() -> None:
    student, signal, _ = pair()
    folded = TeacherDistribution(full=signal.full, outside=OUTSIDE)
    assert len(OWN) == len(OWN_TOKENS)
    with pytest.raises(TeacherError, match="only give their common tokens; set signal: full"):
        compare(SORTED, student.log_softmax(-1), folded)


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"divergence": "jsd"}, "has a fixed distance; leave out divergence"),
        ({"estimator": "score_function"}, "leave out target and estimator"),
        ({"clip": "entries(0.1)"}, "sorted probabilities have none; set clip: loss"),
    ],
)
def test_what_it_cannot_go_with_is_refused(choice, reason) -> None:
    with pytest.raises(ValueError, match=reason):
        Objective.model_validate({"signal": "sorted"} | choice)
