"""Chunks of text and their ends: by loops over a text, where they end, and what a teacher with the same tokens gives."""

import math
import random
from itertools import accumulate, pairwise

import pytest
import torch

from practicum.errors import TeacherError
from practicum.functional.divergences import DIVERGENCES
from practicum.functional.head import Head
from practicum.methods.alm.chunks import CHUNKS, WORD_STARTS, WithChunks
from practicum.objective import Objective, TeacherDistribution
from practicum.objective.translated_answer import TranslatedAnswer
from practicum.types import TeacherSignal
from tests.losses.vocabularies import compare

TERM = Objective.model_validate({"signal": "chunks(3, 0.2)", "divergence": "jsd(0.3)"}).losses[0]
SIZE, WORDS = 7, ([1, 4], [0, 5])
"""The tokens of both models, and the student's and the teacher's tokens before which a chunk ends."""


def draw(rng: random.Random, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**30))
    return 2 * torch.randn(count, SIZE, generator=generator, dtype=torch.float64)


def read(
    rng: random.Random, threshold: float
) -> tuple[TeacherSignal, TranslatedAnswer, torch.Tensor, list[list[int]]]:
    """Return a teacher's signal and its answer in spans with one gap, its log-probabilities, and the lengths of the spans."""
    lengths = [[rng.randrange(1, 4), rng.randrange(1, 4)] for _ in range(rng.randrange(2, 8))]
    gap = rng.randrange(1, len(lengths))
    lengths.insert(gap, [2, 1])
    ends = [list(accumulate([0, *side])) for side in zip(*lengths, strict=True)]
    spans = [
        (slice(*own), slice(*others))
        for own, others in zip(*(pairwise(side) for side in ends), strict=True)
    ]
    del spans[gap]
    states = draw(rng, ends[1][-1])
    answer = TranslatedAnswer(
        TeacherSignal(hidden=states, head=Head(torch.eye(SIZE).double(), SIZE)),
        torch.tensor(rng.choices(range(SIZE), k=len(states))),
        tuple(spans),
        lambda: torch.zeros(0, 3).long(),
        lambda: (torch.tensor(WORDS[0]), torch.tensor(WORDS[1])),
    )
    plain = TeacherSignal(unknown=torch.zeros(ends[0][-1]).bool())
    signal = WithChunks(threshold=threshold).add_more(plain, answer)
    return signal, answer, states.log_softmax(-1), [[gap], *lengths]


def find_chunks(answer: TranslatedAnswer, teacher: torch.Tensor, threshold: float):
    """List the first and last span of each chunk, and whether another span follows at once."""
    chunks, first = [], 0
    for number, (student, span) in enumerate(answer.spans):
        last = number + 1 == len(answer.spans)
        joined = not last and answer.spans[number + 1][0].start == student.stop
        if joined and teacher[span.stop].exp()[WORDS[1]].sum() <= threshold:
            continue
        chunks.append((answer.spans[first], answer.spans[number], joined))
        first = number + 1
    return chunks


@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.9])
def test_it_is_the_divergence_of_each_chunk_and_its_end(threshold: float) -> None:
    rng, sizes = random.Random(0), []
    for _ in range(20):
        signal, answer, teacher, _ = read(rng, threshold)
        assert signal.unknown is not None
        raw = draw(rng, len(signal.unknown)).requires_grad_()
        tokens = torch.tensor(rng.choices(range(SIZE), k=len(raw)))
        student = raw.log_softmax(-1)
        models = TeacherDistribution(
            full=torch.zeros_like(student),
            unknown=signal.unknown,
            extras=signal.extras,
            constants=signal.constants,
        )
        values = compare(TERM, student, models, tokens)
        known = torch.zeros(len(raw)).bool()
        for (begin, theirs), (end, last), is_joined in find_chunks(answer, teacher, threshold):
            pair = [
                sum(float(model[n, ids[n]]) for n in range(start, stop))
                + (float(model[stop].exp()[words].sum().log()) if is_joined else 0.0)
                for model, ids, start, stop, words in (
                    (student.detach(), tokens, begin.start, end.stop, WORDS[0]),
                    (teacher, answer.tokens, theirs.start, last.stop, WORDS[1]),
                )
            ]
            probs = (math.exp(logprob / 3) for logprob in pair)
            both = [torch.tensor([p, 1 - p], dtype=torch.float64).log() for p in probs]
            slow = DIVERGENCES["jsd"].value(*both, 0.3)
            torch.testing.assert_close(values[begin.start], slow, rtol=1e-5, atol=1e-8)
            known[begin.start] = True
            sizes.append(end.stop - begin.start)
            # The gradient reaches the chunk and the token that shows its end, and no other token.
            (slope,) = torch.autograd.grad(values[begin.start], raw, retain_graph=True)
            touched = slope.abs().sum(-1).nonzero()[:, 0].tolist()
            assert touched == list(range(begin.start, end.stop + is_joined))
        assert signal.unknown.equal(~known) and not values[~known].any()
    assert max(sizes) > 3 or threshold == 0.0


def test_no_slice_cuts_a_chunk_from_its_end() -> None:
    rng = random.Random(1)
    for _ in range(20):
        signal, _, _, ((gap,), *lengths) = read(rng, 0.3)
        groups = TERM.signal.read_groups(signal.extras)
        assert groups is not None
        before, between, after = (
            sum(own for own, _ in part)
            for part in (lengths[:gap], lengths[gap : gap + 1], lengths[gap + 1 :])
        )
        slow = torch.zeros(before + between + after, dtype=torch.long)
        slow[0], slow[before + between] = before, after
        assert groups.equal(slow)
    assert TERM.signal.read_groups({}) is None


def test_a_teacher_that_agrees_with_every_chunk_teaches_nothing() -> None:
    rng = random.Random(2)
    raw = draw(rng, 5).requires_grad_()
    student, tokens = raw.log_softmax(-1), torch.tensor([0, 1, 2, 3, 4])
    sums = student.detach()[range(5), tokens].cumsum(0)
    end = student.detach()[2, WORDS[0]].logsumexp(-1)
    column = torch.zeros(5, 3, dtype=torch.float64)
    column[0] = torch.tensor([2.0, sums[1] + end, 1.0])
    column[2] = torch.tensor([3.0, sums[4] - sums[1], 0.0])
    constants = {WORD_STARTS: torch.tensor(WORDS[0])}
    for error in (0.0, 0.5):
        column[0, 1] += error
        signal = TeacherDistribution(
            full=torch.zeros_like(student), extras={CHUNKS: column}, constants=constants
        )
        values = compare(TERM, student, signal, tokens)
        (slope,) = torch.autograd.grad(values.sum(), raw, retain_graph=True)
        assert bool(slope.abs().max() > 1e-6) is bool(error)


def test_without_another_tokenizer_each_token_is_a_chunk() -> None:
    rng = random.Random(3)
    student, teacher = (draw(rng, 4).log_softmax(-1) for _ in range(2))
    tokens = torch.tensor([2, 0, 6, 3])
    values = compare(TERM, student, TeacherDistribution(full=teacher), tokens)
    for place, token in enumerate(tokens.tolist()):
        probs = [(model[place, token] / 3).exp() for model in (student, teacher)]
        both = [torch.stack([p, 1 - p]).log() for p in probs]
        torch.testing.assert_close(values[place], DIVERGENCES["jsd"].value(*both, 0.3))


@pytest.mark.parametrize("signal", ["chunks", "span_token"])
def test_a_pool_of_teachers_with_other_tokens_is_refused(signal: str) -> None:
    term = Objective.model_validate({"signal": signal}).losses[0]
    scores = torch.randn(3, SIZE + 1).log_softmax(-1)
    pooled = TeacherDistribution(full=scores, outside=torch.tensor([2]))
    with pytest.raises(TeacherError, match=f"signal '{signal}' reads the spans of one teacher"):
        compare(term, scores[:, :SIZE].log_softmax(-1), pooled, torch.tensor([0, 1, 3]))
