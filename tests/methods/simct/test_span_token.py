"""A span as one more token: by loops, under an added constant, with slices that cut no span, and joined up to a common token."""

import random
from itertools import accumulate, pairwise

import pytest
import torch

from practicum.functional.divergences import DIVERGENCES
from practicum.functional.head import Head
from practicum.losses.spans import cut_between_groups
from practicum.methods.simct.span_token import SPANS as SPANS_COLUMN
from practicum.methods.simct.span_token import add_spans, join_spans
from practicum.objective import Objective
from practicum.objective.distribution import TeacherDistribution
from practicum.objective.translated_answer import TranslatedAnswer
from practicum.text.alignment import align_tokens
from practicum.types import TeacherSignal
from tests.losses.vocabularies import (
    COMMON,
    OUTSIDE,
    STUDENT_SIZE,
    TEACHER_SIZE,
    logits,
    signal_of,
)
from tests.losses.vocabularies import compare as compare_here

TERM = Objective.model_validate({"signal": "span_token", "divergence": "jsd(0.3)"}).losses[0]
SPANS = {1: (3, -0.7), 6: (2, -4.0)}
"""The length of each span of several tokens by its first token, and the teacher's mean logit less its level there."""


def compare(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    teacher = logits(1, TEACHER_SIZE, 0.0).log_softmax(-1)
    tokens = torch.arange(len(raw)) % STUDENT_SIZE
    joined = torch.zeros(len(raw), 2, dtype=torch.float64)
    for place, numbers in SPANS.items():
        joined[place] = torch.tensor(numbers)
    signal = TeacherDistribution(
        full=signal_of(teacher, tokens).full,
        outside=OUTSIDE,
        extras={SPANS_COLUMN: joined},
        student_level=raw.logsumexp(-1),
    )
    return compare_here(TERM, raw.log_softmax(-1), signal, tokens), teacher, tokens


def test_it_is_a_divergence_over_common_tokens_and_the_span() -> None:
    raw = logits(0, STUDENT_SIZE, 0.0).requires_grad_()
    values, teacher, tokens = compare(raw)
    entry, plain = DIVERGENCES["jsd"], raw.detach()
    for row in range(len(plain)):
        mine, theirs = plain[row, COMMON].tolist(), teacher[row, COMMON].tolist()
        if row in SPANS:
            size, mean = SPANS[row]
            mine.append(sum(float(plain[row + n, tokens[row + n]]) for n in range(size)) / size)
            theirs.append(mean)
        pair = (torch.tensor(part, dtype=torch.float64).log_softmax(0) for part in (mine, theirs))
        torch.testing.assert_close(values[row], entry.value(*pair, 0.3))
    (slope,) = torch.autograd.grad(values[1], raw)
    assert slope[2:4].abs().sum() > 0, "the later tokens of a span move with it"
    assert slope[4:].abs().sum() == 0


def test_a_constant_that_is_nothing_to_a_distribution_changes_it() -> None:
    raw = logits(0, STUDENT_SIZE, 0.0)
    shifted = raw.clone()
    shifted[2] += 2.0
    before, after = compare(raw)[0], compare(shifted)[0]
    changed = (before - after).abs() > 1e-9
    assert changed.nonzero()[:, 0].tolist() == [1], "the span that contains it, as published"


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_slices_cover_all_tokens_and_cut_no_span(size: int) -> None:
    rng = random.Random(size)
    for _ in range(20):
        lengths = [rng.choice([1, 1, 2, 3]) for _ in range(rng.randrange(12))]
        groups = [first for n in lengths for first in (n * (n > 1), *[0] * (n - 1))]
        total = len(groups)
        pieces = list(cut_between_groups(torch.tensor(groups, dtype=torch.long), total, size))
        covered = [place for piece in pieces for place in range(piece.start, piece.stop)]
        assert covered == list(range(total))
        ends = {sum(lengths[:n]) for n in range(len(lengths) + 1)}
        assert all(piece.stop in ends for piece in pieces)
        assert all(piece.stop - piece.start <= max(size, 3) for piece in pieces)
    assert list(cut_between_groups(None, 5, 2)) == [slice(0, 2), slice(2, 4), slice(4, 5)]


def divide(rng: random.Random, text: bytes) -> list[bytes]:
    """Divide a text at random places."""
    places = sorted(rng.sample(range(1, len(text)), rng.randrange(len(text))))
    return [text[start:stop] for start, stop in pairwise([0, *places, len(text)])]


def test_a_joined_span_ends_with_the_next_token_of_both() -> None:
    rng, long = random.Random(0), 0
    for _ in range(200):
        text = bytes(rng.choices(b"ab", k=rng.randrange(2, 12)))
        student, teacher = divide(rng, text), divide(rng, text)
        aligned = [(span.student, span.teacher) for span in align_tokens(student, teacher)]
        # By definition: both texts end at the same place, with the same token.
        ends = [
            {
                (total, piece): place + 1
                for place, (total, piece) in enumerate(zip(totals, pieces, strict=True))
            }
            for pieces in (student, teacher)
            for totals in [accumulate(map(len, pieces))]
        ]
        both = [(place, ends[1][key]) for key, place in ends[0].items() if key in ends[1]]
        slow = [
            (slice(before[0], after[0]), slice(before[1], after[1]))
            for before, after in pairwise([(0, 0), *both])
        ]
        assert join_spans(aligned) == slow
        long += len(aligned) - len(slow)
    assert long > 100, "spans were joined or dropped"


def test_a_gap_begins_a_new_span() -> None:
    pair, single = slice(0, 2), slice(2, 3)
    later = [(slice(5, 7), slice(4, 5)), (slice(7, 8), slice(5, 6))]
    assert join_spans([(pair, pair), *later]) == [(slice(5, 8), slice(4, 6))]
    assert join_spans([(pair, pair), (single, single), *later]) == [
        (slice(0, 3), slice(0, 3)),
        (slice(5, 8), slice(4, 6)),
    ]


@pytest.mark.parametrize("joined", [False, True])
def test_the_teacher_counts_a_joined_token_once(joined: bool) -> None:
    weight = logits(3, TEACHER_SIZE, 0.0)[:, :6].T.float()
    states = logits(4, 6, 0.0)[:5, :6].float()
    head = Head(weight.T.contiguous(), TEACHER_SIZE)
    spans = ((slice(0, 2), slice(0, 1)), (slice(2, 3), slice(1, 2)), (slice(3, 4), slice(2, 3)))
    tokens = torch.tensor([2, 0, 1, 3, 3])
    answer = TranslatedAnswer(
        TeacherSignal(hidden=states, head=head),
        tokens,
        spans,
        lambda: torch.zeros(0, 3).long(),
        lambda: (tokens, tokens),
    )
    unknown = torch.tensor([True, True, False, False])
    signal = add_spans(TeacherSignal(unknown=unknown), answer, joined=joined)
    raw = head.logits(states)
    own = [float(raw[place, token]) for place, token in enumerate(tokens)]
    level = float(raw[0].logsumexp(-1))
    size, mean = (3, (own[0] + own[1]) / 2) if joined else (2, own[0])
    column = torch.zeros(4, 2)
    column[0] = torch.tensor([size, mean - level])
    torch.testing.assert_close(signal.extras[SPANS_COLUMN], column)
    assert signal.unknown is not None
    assert signal.unknown.tolist() == [False, True, joined, False]
