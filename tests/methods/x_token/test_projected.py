"""H-KL of two vocabularies by loops: pairs of tokens, and all unpaired tokens by rank."""

import itertools

import torch

from practicum.functional.divergences import DIVERGENCES
from practicum.functional.projection import pair_columns
from practicum.methods.x_token.projected import SPELLINGS
from practicum.objective import Objective, TeacherDistribution
from tests.losses.vocabularies import (
    COMMON,
    OUTSIDE,
    STUDENT_SIZE,
    TEACHER_SIZE,
    compare,
    logits,
    signal_of,
)

TERM = Objective.model_validate({"signal": "projected(0.5, paired=0.6)"}).losses[0]
OWN_TOKENS = [token for token in range(TEACHER_SIZE) if token not in COMMON]
# The student's 4 is the teacher's first own token and a common one; 10 uses the same token, then three more.
SPELLED = torch.tensor(
    [
        (4, STUDENT_SIZE, 0),
        (4, 2, 1),
        (10, STUDENT_SIZE, 0),
        (10, 3, 1),
        (7, STUDENT_SIZE + 1, 0),
        (7, 0, 1),
        (7, 1, 2),
    ]
)


def test_pairs_are_compared_and_others_ranked() -> None:
    student = logits(0, STUDENT_SIZE, 0.0).requires_grad_()
    teacher = logits(1, TEACHER_SIZE, 0.0).log_softmax(-1)
    tokens = torch.zeros(len(student), dtype=torch.long)
    folded = signal_of(teacher, tokens)
    signal = TeacherDistribution(
        full=folded.full,
        outside=OUTSIDE,
        own=teacher[:, OWN_TOKENS],
        constants={SPELLINGS: SPELLED},
    )
    values = compare(TERM, student.log_softmax(-1), signal)
    entry = DIVERGENCES["reverse_kl"]
    logprobs = student.log_softmax(-1).detach()
    # 4 and 10 both give two thirds to it, and the first gets the teacher's own token; 7 gives 4 of 7 parts.
    pairs = [(token, token) for token in COMMON] + [(4, OWN_TOKENS[0])]
    for row in range(len(logprobs)):
        same = sum(
            entry.contributions(logprobs[row, [mine]], teacher[row, [theirs]], None).sum()
            for mine, theirs in pairs
        )
        lists = [
            sorted(logprobs[row, [7, 10]].exp().tolist(), reverse=True),
            sorted(teacher[row, OWN_TOKENS[1:]].exp().tolist(), reverse=True),
        ]
        ranked = sum(abs(a - b) for a, b in itertools.zip_longest(*lists, fillvalue=0.0))
        torch.testing.assert_close(values[row], same + ranked)
    (slope,) = torch.autograd.grad(values.sum(), student)
    assert slope.isfinite().all() and slope.abs().max() > 0


def test_a_column_is_taken_once_and_a_weak_part_pairs_nothing() -> None:
    shared, tokens = torch.tensor([0, 2]), torch.tensor([1, 3, 4, 4])
    columns, weights = torch.tensor([2, 5, 5, 6]), torch.tensor([1.0, 0.7, 0.65, 0.35])
    found = pair_columns(shared, tokens, columns, weights, 0.6)
    assert [part.tolist() for part in found] == [[0, 2, 3], [0, 2, 5]]
