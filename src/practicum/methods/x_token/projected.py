"""Compare student and teacher in the teacher's vocabulary, as X-Token does."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from jaxtyping import Int
from pydantic import Field
from torch import Tensor

from practicum.errors import TeacherError
from practicum.functional.projection import decay_weights, pair_columns, project
from practicum.functional.sequence import add_later
from practicum.functional.sorting import sorted_l1
from practicum.objective.distribution import SignalComparison
from practicum.objective.estimator_call import EstimatorCall
from practicum.objective.signal_call import Full, SignalCall
from practicum.objective.translated_answer import TranslatedAnswer
from practicum.types import TeacherSignal

SPELLINGS = "spellings"
"""The constant with the rows of `TranslatedAnswer.spell`."""


AVERAGED = "averaged"
"""The column with two numbers at the first token of each span, and 0 elsewhere.

The first number is the count of the student's tokens. The second, added to the log-probabilities of
the teacher's mean hidden state, gives the mean of its log-probabilities over the span.
"""

SMALLEST = 1e-10
"""The number that is added to probabilities before their logarithm, as in the released code."""


class Spelled(Full):
    """The full distribution, averaged over each span, and the spellings of tokens that a teacher lacks."""

    reads_more: ClassVar[bool] = True

    def add_more(self, signal: TeacherSignal, answer: TranslatedAnswer) -> TeacherSignal:
        """Add the spellings, and place the teacher's mean over each span with the column `AVERAGED`.

        A head that caps its logits averages them before the cap.
        """
        states, head, unknown = answer.signal.states, answer.signal.head, signal.unknown
        assert states is not None and head is not None and unknown is not None
        averaged = torch.zeros(len(unknown), 2)
        means = states[[teacher.start for _, teacher in answer.spans]]
        for number, (student, teacher) in enumerate(answer.spans):
            shift = 0.0
            if teacher.stop - teacher.start > 1:
                # The mean of logits is the logits of the mean state: one row stands for several.
                means[number] = states[teacher].float().mean(dim=0).to(means)
                rows = torch.cat([states[teacher], means[number, None]])
                levels = head.logits(rows).detach().logsumexp(dim=-1)
                shift = float(levels[-1] - levels[:-1].mean())
            averaged[student.start] = torch.tensor([student.stop - student.start, shift])
        placed = answer.place_states(signal, [part.start for part, _ in answer.spans], means)
        return replace(
            placed,
            constants={**placed.constants, SPELLINGS: answer.spell()},
            extras={**placed.extras, AVERAGED: averaged},
        )


class Config(SignalCall):
    """The divergence in the teacher's vocabulary, of the projected student distribution.

    The probability of a token that the teacher lacks is distributed over the teacher tokens that
    spell its text, by powers of `decay`. Both distributions are averaged over each span of text that
    the tokenizers share (P-KL of X-Token 2605.21699 and its code in NVIDIA-NeMo/RL). With `paired`,
    if the largest weight of a token is at least `paired`, the token is compared with the teacher
    token that has this weight; all other tokens are compared by rank (H-KL).
    """

    type: Literal["projected"] = "projected"
    decay: float = Field(default=0.1, ge=0, le=1)
    paired: float | None = Field(default=None, gt=0.5, le=1)
    measures: ClassVar[bool] = True
    compares: ClassVar[bool] = True
    unshared: ClassVar[bool] = True

    @property
    def question(self) -> Spelled:
        """Return the full distribution, with spellings."""
        return Spelled()

    def read_groups(self, extras: Mapping[str, Tensor]) -> Int[Tensor, " T"] | None:
        """Return the lengths of the spans, over which distributions are averaged."""
        return extras[AVERAGED][:, 0].long() if AVERAGED in extras else None

    def explain_conflict(self, gradient: EstimatorCall, divergence: str, plain: bool) -> str | None:
        """Refuse every estimator except the derivative."""
        if gradient.pathwise and plain:
            return None
        return (
            "signal 'projected' differentiates a divergence in the teacher's vocabulary; leave out "
            "target and estimator"
        )

    def compare(self, comparison: SignalComparison) -> Tensor:
        """Return the divergence in the teacher's vocabulary."""
        return compare_projected(comparison, self.decay, self.paired)


def compare_projected(
    comparison: SignalComparison, decay: float, paired: float | None = None
) -> Tensor:
    """Return the divergence at each position in the teacher's vocabulary, or by pairs with `paired`.

    Both distributions are means over the student's and the teacher's tokens of a span: of
    probabilities for the student, which add up to 1, and of log-probabilities for the teacher, which
    add up to less. Raises TeacherError for a teacher that does not report how it spells the tokens
    that it lacks.
    """
    student, teacher = comparison.student, comparison.teacher
    full = teacher.full
    assert full is not None, "the signal asks for whole distributions"
    if teacher.outside is None:
        return comparison.contributions(student, full).sum(dim=-1)
    spellings, unshared = teacher.constants.get(SPELLINGS), teacher.own
    if spellings is None or unshared is None:
        raise TeacherError(
            f"signal 'projected' needs to know how the {comparison.against} writes the tokens that it "
            "lacks, which only a single teacher of type translated reports; set signal: full"
        )
    target = torch.cat([full[:, :-1], unshared], dim=-1)
    averaged = teacher.extras.get(AVERAGED, target.new_zeros(len(target), 2))
    lengths, target = averaged[:, 0].long(), target + averaged[:, 1:]
    size = student.shape[-1]
    is_shared = torch.ones(size, dtype=torch.bool, device=student.device)
    is_shared[teacher.outside] = False
    shared, width = is_shared.nonzero()[:, 0], target.shape[-1]
    tokens, columns, places = spellings.unbind(-1)
    weights = decay_weights(tokens, places, size, decay)
    if paired is not None:
        pairs = pair_columns(shared, tokens, columns, weights, paired)
        means = _average(student, lengths)
        return _compare_pairs(comparison, means, target, *pairs, is_shared)
    probs = _average(project(student, shared, tokens, columns, weights, width), lengths)
    # Drop the columns of tokens that only the student has, which have no mass on either side.
    used = torch.cat([is_shared, is_shared.new_ones(unshared.shape[-1])]).nonzero()[:, 0]
    probs = probs[:, used]
    logprobs = (probs / (probs.sum(dim=-1, keepdim=True) + SMALLEST) + SMALLEST).log()
    return comparison.contributions(logprobs, target[:, used]).sum(dim=-1)


def _average(values: Tensor, lengths: Tensor) -> Tensor:
    """Return the mean over a span at its first token; other tokens keep their own value."""
    return add_later(values, lengths) / lengths.clamp(min=1)[:, None]


def _compare_pairs(
    comparison: SignalComparison,
    student: Tensor,
    target: Tensor,
    tokens: Tensor,
    columns: Tensor,
    is_shared: Tensor,
) -> Tensor:
    """Return the divergence of paired tokens plus the distance by rank of all other tokens (H-KL)."""
    same = comparison.contributions(student[:, tokens], target[:, columns])
    unpaired = torch.ones(student.shape[-1], dtype=torch.bool, device=student.device)
    unpaired[tokens] = False
    unpaired_columns = torch.ones(target.shape[-1], dtype=torch.bool, device=student.device)
    # Exclude the columns of tokens that only the student has.
    unpaired_columns[: len(is_shared)] = is_shared
    unpaired_columns[columns] = False
    unmatched = student[:, unpaired], target[:, unpaired_columns]
    # The released code drops the least likely tokens of the longer list instead of padding the shorter.
    count = min(part.shape[-1] for part in unmatched)
    ranked = sorted_l1(*(part.topk(count, dim=-1).values for part in unmatched))
    return same.sum(dim=-1) + ranked
