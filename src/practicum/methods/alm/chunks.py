"""Compare the probabilities of text chunks and of their ends (ALM 2503.20083, tokenkit)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad

from practicum.functional.binarised import binarised
from practicum.functional.precision import finite
from practicum.objective.distribution import SignalComparison
from practicum.objective.signal_call import Full
from practicum.objective.states_signal import StatesSignal
from practicum.objective.translated_answer import TranslatedAnswer
from practicum.types import TeacherSignal

CHUNKS = "chunks"
"""The column with three numbers at the first token of each chunk, and 0 elsewhere.

They are the count of the student's tokens, the teacher's log-probability of the chunk and its end,
and 1 if the next token tells whether the chunk is at its end, which is 0 before a gap.
"""

WORD_STARTS = "word_starts"
"""The constant with the student's tokens before which a chunk ends."""

ROWS = 64
"""The number of positions with log-probabilities in memory at once."""


class WithChunks(Full):
    """The full distribution with the chunks of the text, which only this signal requests."""

    threshold: float = 0.1
    reads_more: ClassVar[bool] = True

    def add_more(self, signal: TeacherSignal, answer: TranslatedAnswer) -> TeacherSignal:
        """Add the column `CHUNKS`, and mark only the first token of each chunk as known."""
        return add_chunks(signal, answer, self.threshold)


class Config(StatesSignal):
    """The divergence of two Bernoulli variables: the chunk of text and its end, or any other text.

    Both have probability p ** (1 / `tau`). The end is a token that begins with a space or a line
    break, or a control token. Spans are joined until the teacher expects an end with more than
    `threshold`. ALM 2503.20083.
    """

    type: Literal["chunks"] = "chunks"
    tau: float = Field(default=100.0, gt=0)
    threshold: float = Field(default=0.1, ge=0, lt=1)
    measures: ClassVar[bool] = True
    compares: ClassVar[bool] = True
    unshared: ClassVar[bool] = True

    @property
    def question(self) -> WithChunks:
        """Return the full distribution, with chunks."""
        return WithChunks(threshold=self.threshold)

    def read_groups(self, extras: Mapping[str, Tensor]) -> Int[Tensor, " T"] | None:
        """Return the lengths of stretches of chunks: the end of a chunk is read at the next chunk."""
        if CHUNKS not in extras:
            return None
        groups = torch.zeros(len(extras[CHUNKS]), dtype=torch.long)
        first = None
        for place, (size, _, has_end) in enumerate(extras[CHUNKS].tolist()):
            if size:
                first = place if first is None else first
                groups[first] += int(size)
                first = first if has_end else None
        return groups

    def compare(self, comparison: SignalComparison) -> Tensor:
        """Return the divergence of each chunk at its first token."""
        self.require_spans(comparison, CHUNKS)
        return compare_chunks(comparison, self.tau)


def add_chunks(signal: TeacherSignal, answer: TranslatedAnswer, threshold: float) -> TeacherSignal:
    """Add the column `CHUNKS`, and mark only the first token of each chunk as known."""
    states, head, unknown = answer.signal.states, answer.signal.head, signal.unknown
    assert states is not None and head is not None and unknown is not None
    student_words, teacher_words = answer.find_word_starts()
    logprobs, ends = [], []
    with torch.no_grad():
        tokens = answer.tokens.to(states.device)
        for rows, part in zip(states.split(ROWS), tokens.split(ROWS), strict=True):
            scores = head.logprobs(rows).to(states.device)
            logprobs.append(scores.gather(-1, part[:, None])[:, 0])
            ends.append(scores[:, teacher_words.to(states.device)].logsumexp(dim=-1))
    logprob, end = torch.cat(logprobs).cpu(), torch.cat(ends).cpu()
    chunks, rows = torch.zeros(len(unknown), 3), torch.zeros(len(unknown), dtype=torch.long)
    unknown, first = torch.ones_like(unknown), None
    following = [*answer.spans[1:], (slice(-1, -1), slice(-1, -1))]
    for (student, teacher), after in zip(answer.spans, following, strict=True):
        first = first or (student.start, teacher.start)
        has_end = (student.stop, teacher.stop) == (after[0].start, after[1].start)
        if has_end and end[teacher.stop].exp() <= threshold:
            continue
        total = logprob[first[1] : teacher.stop].sum() + (end[teacher.stop] if has_end else 0.0)
        chunks[first[0]] = torch.tensor([student.stop - first[0], total, has_end])
        rows[first[0]], unknown[first[0]], first = first[1], False, None
    return replace(
        signal,
        hidden=states[rows.to(states.device)],
        unknown=unknown,
        extras={**signal.extras, CHUNKS: chunks},
        constants={**signal.constants, WORD_STARTS: student_words},
    )


def compare_chunks(comparison: SignalComparison, tau: float) -> Float[Tensor, " T"]:
    """Return the divergence of each chunk at its first token, differentiable in all its tokens.

    Without chunks, from a teacher with the student's tokens, each token is a chunk without end.
    """
    student, teacher, tokens = comparison.student, comparison.teacher, comparison.tokens[:, None]
    logprobs, columns = finite(student.gather(-1, tokens)[:, 0]), teacher.extras.get(CHUNKS)
    divergence, parameter = comparison.divergence, comparison.parameter
    if columns is None:
        assert teacher.full is not None, "the signal asks for whole distributions"
        return binarised(
            divergence, logprobs, teacher.full.gather(-1, tokens)[:, 0], tau, parameter
        )
    starts = columns[:, 0].nonzero()[:, 0]
    stops = starts + columns[starts, 0].long()
    total = pad(logprobs.double().cumsum(dim=0), (1, 0))
    next_rows = student[stops.clamp(max=len(logprobs) - 1)]
    end = next_rows[:, teacher.constants[WORD_STARTS]].logsumexp(dim=-1)
    chunk = total[stops] - total[starts] + torch.where(columns[starts, 2] > 0, end, 0.0)
    values = binarised(divergence, chunk, columns[starts, 1].to(chunk), tau, parameter)
    return torch.zeros_like(logprobs).index_copy(0, starts, values.to(logprobs))
