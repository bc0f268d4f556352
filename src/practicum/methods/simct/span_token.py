"""Treat a multi-token span as an additional token of a common vocabulary, as SimCT (2605.07711) does.

The logit of a span is the mean of its tokens' logits. Adding a constant to the logits of a single
position therefore changes the loss, although it does not change a distribution. The method is
implemented as published, for comparison.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum.functional.precision import precise
from practicum.objective.distribution import SignalComparison
from practicum.objective.signal_call import Full
from practicum.objective.states_signal import StatesSignal
from practicum.objective.translated_answer import TranslatedAnswer
from practicum.types import TeacherSignal

SPANS = "spans"
"""The column with two numbers at the first token of each span of several tokens, and 0 elsewhere.

The first number is the count of the student's tokens. The second is the mean of the teacher's logits
of its tokens in the span, minus the logsumexp of its logits at the first.
"""

ROWS = 64
"""The number of positions with logits in memory at once."""


class WithSpans(Full):
    """The full distribution with multi-token spans, which only this signal requests."""

    joined: bool = False
    reads_more: ClassVar[bool] = True

    def add_more(self, signal: TeacherSignal, answer: TranslatedAnswer) -> TeacherSignal:
        """Add the column `SPANS`, and mark the first token of each span of several as known."""
        return add_spans(signal, answer, joined=self.joined)


class Config(StatesSignal):
    """The common tokens and one token for the multi-token span that starts at the position.

    The span's logit is the mean logit of its tokens (SimCT 2605.07711). A span is the smallest
    stretch between boundaries of both tokenizers. With `joined` it also has the spans after it, up
    to the next text with a single token on each side, as in the released code.
    """

    type: Literal["span_token"] = "span_token"
    joined: bool = False
    measures: ClassVar[bool] = True
    compares: ClassVar[bool] = True
    unshared: ClassVar[bool] = True
    needs_student_level: ClassVar[bool] = True

    @property
    def question(self) -> WithSpans:
        """Return the full distribution, with spans."""
        return WithSpans(joined=self.joined)

    def read_groups(self, extras: Mapping[str, Tensor]) -> Int[Tensor, " T"] | None:
        """Return the lengths of the spans; the logits of a span are averaged."""
        return extras[SPANS][:, 0].long() if SPANS in extras else None

    def compare(self, comparison: SignalComparison) -> Tensor:
        """Return the divergence over the shared tokens and the span at the position."""
        self.require_spans(comparison, SPANS)
        return compare_with_span_token(comparison)


def join_spans(spans: Iterable[tuple[slice, slice]]) -> list[tuple[slice, slice]]:
    """Join each span of several tokens with the spans after it, up to the next pair of single tokens.

    Spans after the last pair are dropped, as in the released code. A gap between two spans, such as
    another author's turn, begins a new span, because no text may contain it.
    """
    joined: list[tuple[slice, slice]] = []
    start = stop = (0, 0)
    for student, teacher in spans:
        if start == stop or stop != (student.start, teacher.start):
            start = student.start, teacher.start
        stop = student.stop, teacher.stop
        if student.stop - student.start == teacher.stop - teacher.start == 1:
            joined.append((slice(start[0], stop[0]), slice(start[1], stop[1])))
            start = stop
    return joined


def add_spans(
    signal: TeacherSignal, answer: TranslatedAnswer, *, joined: bool = False
) -> TeacherSignal:
    """Add the column `SPANS`, and mark only the first token of each span of several as known."""
    states, head, unknown = answer.signal.states, answer.signal.head, signal.unknown
    assert states is not None and head is not None and unknown is not None
    token_logits, levels = [], []
    # Process a few rows at a time: the logits of a complete answer would need much memory.
    with torch.no_grad():
        tokens = answer.tokens.to(states.device)
        for rows, part in zip(states.split(ROWS), tokens.split(ROWS), strict=True):
            logits = head.logits(rows)
            token_logits.append(logits.gather(-1, part[:, None].to(logits.device))[:, 0])
            levels.append(logits.logsumexp(dim=-1))
    logits, level = torch.cat(token_logits).cpu(), torch.cat(levels).cpu()
    spans = torch.zeros(len(unknown), 2)
    rows, unknown = torch.zeros(len(unknown), dtype=torch.long), unknown.clone()
    for student, teacher in join_spans(answer.spans) if joined else answer.spans:
        rows[student.start] = teacher.start
        size = student.stop - student.start
        if size > 1 or teacher.stop - teacher.start > 1:
            mean = logits[teacher].mean() - level[teacher.start]
            spans[student.start] = torch.tensor([size, mean])
            unknown[student] = True
            unknown[student.start] = False
    hidden = states[rows.to(states.device)]
    return replace(signal, hidden=hidden, unknown=unknown, extras={**signal.extras, SPANS: spans})


def compare_with_span_token(comparison: SignalComparison) -> Float[Tensor, " T"]:
    """Return the divergence over the shared tokens and the span at each position, if any.

    Both distributions are renormalized over these tokens. The gradient of a span's mean logit
    reaches each token of the span.
    """
    student, teacher, tokens = comparison.student, comparison.teacher, comparison.tokens
    full = teacher.full
    assert full is not None, "the signal asks for whole distributions"
    student_part, teacher_part = student, full
    if teacher.outside is not None:
        is_shared = torch.ones(student.shape[-1], dtype=torch.bool, device=student.device)
        is_shared[teacher.outside] = False
        student_part, teacher_part = student[:, is_shared], full[:, :-1][:, is_shared]
    student_part, teacher_part = precise(student_part), precise(teacher_part)
    pair = student_part.log_softmax(dim=-1), teacher_part.log_softmax(dim=-1)
    values = comparison.contributions(*pair).sum(dim=-1)
    spans = teacher.extras.get(SPANS)
    if spans is None or teacher.student_level is None:
        return values
    starts = spans[:, 0].nonzero()[:, 0]
    if not len(starts):
        return values
    logits = _average_logits(student, teacher.student_level, spans, starts, tokens)
    with_span = comparison.contributions(
        _append(student_part[starts], logits),
        _append(teacher_part[starts], spans[starts, 1]),
    ).sum(dim=-1)
    return values.index_copy(0, starts, with_span.to(values))


def _append(scores: Tensor, logits: Tensor) -> Tensor:
    """Append a logit to the scores and return log-probabilities."""
    return torch.cat([scores, logits[:, None].to(scores)], dim=-1).log_softmax(dim=-1)


def _average_logits(
    student: Tensor, level: Tensor, spans: Tensor, starts: Tensor, tokens: Tensor
) -> Tensor:
    """Return the mean raw logit of each span's tokens minus the log-normalizer at its start."""
    logits = student.gather(-1, tokens[:, None])[:, 0] + level
    sizes = spans[starts, 0].long()
    numbers = torch.arange(len(starts), device=logits.device).repeat_interleave(sizes)
    first = sizes.cumsum(0) - sizes
    places = starts[numbers] + torch.arange(len(numbers), device=logits.device) - first[numbers]
    total = logits.new_zeros(len(starts)).index_add(0, numbers, logits[places])
    return total / sizes - level[starts]
