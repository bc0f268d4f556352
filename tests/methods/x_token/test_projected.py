"""X-Token by loops: means over spans, pairs of tokens, and all unpaired tokens by rank."""

import pytest
import torch

from practicum.functional.divergences import DIVERGENCES
from practicum.functional.projection import pair_columns
from practicum.losses.signal_reader import read_tokens
from practicum.methods.x_token.projected import AVERAGED, SPELLINGS, Spelled
from practicum.objective import Objective, TeacherDistribution
from tests.losses.spans import LONG, SHORT, score, write
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
        # The longer list is cut.
        ranked = sum(abs(a - b) for a, b in zip(*lists, strict=False))
        torch.testing.assert_close(values[row], same + ranked)
    (slope,) = torch.autograd.grad(values.sum(), student)
    assert slope.isfinite().all() and slope.abs().max() > 0


def test_a_column_is_taken_once_and_a_weak_part_pairs_nothing() -> None:
    shared, tokens = torch.tensor([0, 2]), torch.tensor([1, 3, 4, 4])
    columns, weights = torch.tensor([2, 5, 5, 6]), torch.tensor([1.0, 0.65, 0.7, 0.3])
    found = pair_columns(shared, tokens, columns, weights, 0.6)
    assert [part.tolist() for part in found] == [[0, 2, 4], [0, 2, 5]]


@pytest.mark.parametrize(("student", "teacher"), [(SHORT, LONG), (LONG, SHORT)])
def test_both_sides_are_means_over_a_span(student, teacher) -> None:
    term = Objective.model_validate(
        {"signal": "projected(0.3)", "divergence": "forward_kl"}
    ).losses[0]
    for seed, text in enumerate(["abcab", "bb", "c", "acbbca"]):
        scored = score(Spelled(), text, student, teacher, seed)
        tokens = write(student, text).tokens
        raw = torch.randn(len(tokens), student.vocab_size).double().requires_grad_()
        answer = read_tokens(scored.signal, slice(None), with_own=True)
        assert answer.own is not None and answer.full is not None and answer.outside is not None
        values = compare(term, raw.log_softmax(-1), answer, tokens)
        outside = answer.outside.tolist()
        shared = [n for n in range(student.vocab_size) if n not in outside]
        matrix = torch.zeros(student.vocab_size, student.vocab_size + answer.own.shape[-1]).double()
        matrix[shared, shared] = 1.0
        spelled = answer.constants[SPELLINGS].tolist()
        for token, column, place in spelled:
            total = sum(0.3**n for one, _, n in spelled if one == token)
            matrix[token, column] += 0.3**place / total
        used = [n for n in range(matrix.shape[1]) if n not in outside]
        names = student.tokenizer.convert_ids_to_tokens(shared)
        same = [
            2 if n == 2 else teacher.tokenizer.convert_tokens_to_ids(name)
            for n, name in zip(shared, names, strict=True)
        ]
        order = same + [n for n in range(teacher.vocab_size) if n not in same]
        for span in scored.text.spans:
            probs = (raw.detach().softmax(-1)[span.student] @ matrix)[:, used].mean(0)
            target = scored.rows.double()[span.teacher].mean(0)[order]
            expected = (target.exp() * (target - (probs / probs.sum() + 1e-10).log())).sum()
            assert values[span.student.start].item() == pytest.approx(float(expected), rel=1e-4)
            assert answer.extras[AVERAGED][span.student.start, 1] <= 1e-6, "a mean of logarithms"
            (slope,) = torch.autograd.grad(values[span.student.start], raw, retain_graph=True)
            moved = slope.abs().sum(-1).nonzero()[:, 0].tolist()
            assert moved == list(range(span.student.start, span.student.stop))
