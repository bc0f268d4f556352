"""Treat a span of tokens as one action: the advantage of a text that has one log-probability."""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Int
from torch import Tensor

from practicum.functional.chunked import chunks
from practicum.functional.sequence import share_spans, sum_spans
from practicum.losses.tokens import TokenBatch
from practicum.objective.spec import Term

SpanAdvantage = Callable[[Tensor, Tensor, TokenBatch], Tensor]
"""A function that returns the advantage of each token's span, from the tokens' student and teacher
log-probabilities.
"""


def compile_span_advantage(term: Term) -> SpanAdvantage:
    """Return the function that computes the advantage of each token's span.

    The span is one action: its gradient is the whole advantage times the gradient of its tokens'
    summed log-probabilities. So tokens get no share of the advantage, unless the term asks for
    shares as published.
    """
    compute_advantage, share = term.compute_advantage, term.signal.span_share

    def compute(student: Tensor, teacher: Tensor, batch: TokenBatch) -> Tensor:
        spans = batch.spans
        if spans is None:
            return compute_advantage(student, teacher)
        advantage = compute_advantage(*_sum_both(student, teacher, spans))
        return advantage if share == "whole" else share_spans(advantage, student, spans, share)

    return compute


def _sum_both(student: Tensor, teacher: Tensor, spans: Tensor) -> tuple[Tensor, Tensor]:
    """Return both log-probabilities of each span; for several tokens, relative to the larger of the
    two.

    Advantages of f-divergences are functions of their difference. They floor the teacher at a value
    for a single token, and any long text lies below it.
    """
    sizes = sum_spans(torch.ones_like(student), spans)
    student, teacher = sum_spans(student, spans), sum_spans(teacher, spans)
    largest = torch.where(sizes > 1, torch.maximum(student, teacher), 0.0)
    return student - largest, teacher - largest


def carry_to_next(advantages: Tensor, spans: Tensor, batch: TokenBatch) -> Tensor:
    """Return at the first token of each span the advantage of the span right before it, else 0.

    The next token decides where a span ends: an early stop turns the beginning of a word into a
    word, so the stop token must get the advantage of this span.
    """
    carried = torch.zeros_like(advantages)
    follows = (batch.rows[1:] == batch.rows[:-1]) & (
        batch.positions[1:] == batch.positions[:-1] + 1
    )
    is_next = follows & (spans[1:] != spans[:-1])
    carried[1:] = torch.where(is_next, advantages[:-1], 0.0)
    return carried


def cut_between_groups(groups: Int[Tensor, " T"] | None, total: int, size: int) -> Iterator[slice]:
    """Return consecutive slices of about `size` tokens that do not split any group.

    `groups` has the length of each group at its first token. None: there are no groups.
    """
    if groups is None:
        yield from chunks(total, size)
        return
    lengths = groups.tolist()
    start = end = place = 0
    while place < total:
        # A group that is longer than `size` becomes one slice.
        after = place + max(lengths[place], 1)
        if after - start > size and end > start:
            yield slice(start, end)
            start = end
        place = end = after
    if end > start:
        yield slice(start, end)
