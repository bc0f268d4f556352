"""A span of several tokens is one more token of a common vocabulary, as SimCT (2605.07711) does.

Its logit is the mean of its tokens' own, so a constant added to the logits of one position, which is
nothing to a distribution, changes the loss. It is here as published, for comparison.
"""

from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.functional.precision import precise
from practicum.objective.distribution import SignalComparison
from practicum.objective.signal_call import Full
from practicum.objective.states_signal import StatesSignal


class Joined(Full):
    """The same with the spans of several tokens; only this signal asks for it."""

    joined: ClassVar[bool] = True


class Config(StatesSignal):
    """The tokens that both vocabularies have, and one for the span of several that starts here.

    Its logit is the mean of its tokens' (SimCT 2605.07711).
    """

    type: Literal["span_token"] = "span_token"
    measures: ClassVar[bool] = True
    compares: ClassVar[bool] = True
    unshared: ClassVar[bool] = True

    @property
    def question(self) -> Joined:
        """Return the full distribution, with spans."""
        return Joined()

    def compare(self, comparison: SignalComparison) -> Tensor:
        """Return the divergence over shared tokens and the span that starts here."""
        return compare_with_span_token(comparison)


def compare_with_span_token(comparison: SignalComparison) -> Float[Tensor, " T"]:
    """Return the divergence over the tokens that both have and the span that starts here, if any.

    Both sides are renormalised over these. Each token of a span moves with its mean logit.
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
    if teacher.joined is None or teacher.student_level is None:
        return values
    starts = teacher.joined[:, 0].nonzero()[:, 0]
    if not len(starts):
        return values
    logits = _average_logits(student, teacher.student_level, teacher.joined, starts, tokens)
    with_span = comparison.contributions(
        _append(student_part[starts], logits),
        _append(teacher_part[starts], teacher.joined[starts, 1]),
    ).sum(dim=-1)
    return values.index_copy(0, starts, with_span.to(values))


def _append(scores: Tensor, logits: Tensor) -> Tensor:
    """Return the log-probabilities of tokens and of one more."""
    return torch.cat([scores, logits[:, None].to(scores)], dim=-1).log_softmax(dim=-1)


def _average_logits(
    student: Tensor, level: Tensor, joined: Tensor, starts: Tensor, tokens: Tensor
) -> Tensor:
    """Return the mean raw logit of each span's tokens, less the level where it starts."""
    logits = student.gather(-1, tokens[:, None])[:, 0] + level
    sizes = joined[starts, 0].long()
    numbers = torch.arange(len(starts), device=logits.device).repeat_interleave(sizes)
    first = sizes.cumsum(0) - sizes
    places = starts[numbers] + torch.arange(len(numbers), device=logits.device) - first[numbers]
    total = logits.new_zeros(len(starts)).index_add(0, numbers, logits[places])
    return total / sizes - level[starts]
