"""Positions of two tokenizations by span, with a product of probabilities, and by index."""

import itertools

import pytest
import torch

from practicum.functional.divergences import DIVERGENCES
from practicum.losses.signal_reader import read_tokens
from practicum.methods.uld.sorted import MERGED, ByIndex, BySpan
from practicum.objective import Objective, TeacherDistribution
from tests.losses.spans import LONG, SHORT, score, write
from tests.losses.vocabularies import COMMON, TEACHER_SIZE, compare, logits

PAIRS = [(SHORT, LONG), (LONG, SHORT)]
EVERY = pytest.mark.parametrize(("student", "teacher"), PAIRS, ids=["shorter", "longer"])
TEXTS = ["abcab", "bb", "c", "acbbca"]


def rank_slowly(one: list[float], other: list[float]) -> float:
    ranks = itertools.zip_longest(
        sorted(one, reverse=True), sorted(other, reverse=True), fillvalue=0.0
    )
    return sum(abs(a - b) for a, b in ranks)


@EVERY
def test_the_entry_of_the_first_token_is_the_probability_of_the_span(student, teacher) -> None:
    for seed, text in enumerate(TEXTS):
        scored = score(BySpan(), text, student, teacher, seed)
        known = [span.student.start for span in scored.text.spans]
        assert scored.signal.unknown is not None
        assert (~scored.signal.unknown).nonzero()[:, 0].tolist() == known
        answer = read_tokens(scored.signal, slice(None), with_own=True)
        assert answer.full is not None and answer.own is not None
        logprobs = scored.rows.gather(-1, scored.tokens[:, None])[:, 0]
        for span in scored.text.spans:
            size, later = answer.extras[MERGED][span.student.start].tolist()
            assert size == span.student.stop - span.student.start
            first = float(logprobs[span.teacher.start])
            assert first + later == pytest.approx(float(logprobs[span.teacher].sum()), abs=1e-5)
            row = (
                answer.own[span.student.start].exp().sum()
                + answer.full[span.student.start, :-1].exp().sum()
            )
            assert float(row) == pytest.approx(1.0, abs=1e-5), (
                "the row of the first token, unscaled"
            )


@EVERY
@pytest.mark.parametrize("matched", [False, True])
def test_a_span_is_compared_by_loops_over_its_tokens(student, teacher, matched: bool) -> None:
    choice = {"signal": f"sorted(matched={str(matched).lower()})"}
    term = Objective.model_validate(
        choice | ({"divergence": "jsd(0.3)"} if matched else {})
    ).losses[0]
    for seed, text in enumerate(TEXTS):
        scored = score(BySpan(), text, student, teacher, seed)
        one = write(student, text)
        # A loss of sorted values has no slope if each value is below its partner, or each above.
        stream = torch.Generator().manual_seed(seed)
        raw = torch.randn(len(one.tokens), student.vocab_size, generator=stream)
        raw = raw.double().requires_grad_()
        logprobs = raw.log_softmax(-1)
        answer = read_tokens(scored.signal, slice(None), with_own=True)
        values = compare(term, logprobs, answer, one.tokens)
        common = [n for n in range(student.vocab_size) if n not in answer.outside.tolist()]
        mine, theirs = logprobs.detach().exp(), scored.rows.double().exp()
        for span in scored.text.spans:
            S, T = mine[span.student.start].clone(), theirs[span.teacher.start].clone()
            for place in range(span.student.start + 1, span.student.stop):
                S *= mine[place, one.tokens[place]]
            for place in range(span.teacher.start + 1, span.teacher.stop):
                T *= theirs[place, scored.tokens[place]]
            ids = student.tokenizer.convert_ids_to_tokens(common)
            same = [
                2 if n == 2 else teacher.tokenizer.convert_tokens_to_ids(name)
                for n, name in zip(common, ids, strict=True)
            ]
            if not matched:
                expected = rank_slowly(S.tolist(), T.tolist())
            else:
                parts = DIVERGENCES["jsd"].contributions(S[common].log(), T[same].log(), 0.3)
                rest = [
                    [float(p) for n, p in enumerate(probs) if n not in shared]
                    for probs, shared in ((S, common), (T, same))
                ]
                weight = len(common) / teacher.vocab_size
                expected = weight * float(parts.sum()) + (1 - weight) * rank_slowly(*rest)
            assert values[span.student.start].item() == pytest.approx(expected, rel=1e-5)
        start = max(scored.text.spans, key=lambda span: span.student.stop - span.student.start)
        (slope,) = torch.autograd.grad(values[start.student.start], raw)
        moved = slope.abs().sum(-1).nonzero()[:, 0].tolist()
        assert moved == list(range(start.student.start, start.student.stop))


@EVERY
def test_by_index_the_token_of_the_same_number_is_compared(student, teacher) -> None:
    for seed, text in enumerate(TEXTS):
        scored = score(ByIndex(), text, student, teacher, seed)
        count = min(len(write(student, text).tokens), len(scored.tokens))
        assert scored.signal.unknown is not None
        assert (~scored.signal.unknown).nonzero()[:, 0].tolist() == list(range(count))
        answer = read_tokens(scored.signal, slice(0, count), with_own=True)
        assert answer.full is not None and answer.own is not None
        kept = [n for n in range(student.vocab_size) if n not in answer.outside.tolist()]
        row = torch.cat([answer.full[:, kept], answer.own], dim=-1).sort(dim=-1).values
        torch.testing.assert_close(row, scored.rows[:count].sort(dim=-1).values)


def test_a_student_without_tokens_of_its_own_has_no_distance_by_rank() -> None:
    term = Objective.model_validate(
        {"signal": "sorted(matched=true)", "divergence": "forward_kl"}
    ).losses[0]
    student = logits(0, len(COMMON), 0.0).log_softmax(-1)
    teacher = logits(1, TEACHER_SIZE, 0.0).log_softmax(-1)
    own = [token for token in range(TEACHER_SIZE) if token not in COMMON]
    full = torch.cat([teacher[:, COMMON], teacher[:, own].logsumexp(-1, keepdim=True)], dim=-1)
    signal = TeacherDistribution(full=full, outside=torch.zeros(0).long(), own=teacher[:, own])
    same = DIVERGENCES["forward_kl"].contributions(student, teacher[:, COMMON], None).sum(-1)
    torch.testing.assert_close(compare(term, student, signal), len(COMMON) / TEACHER_SIZE * same)
