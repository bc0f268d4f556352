"""Compare the student with its teacher on held-out answers, exactly or by an estimate.

Reverse KL is exact if both models return full distributions. Otherwise it is estimated by the mean
log-ratio of tokens that the student sampled from its full distribution, at temperature 1. On greedy
answers this mean does not estimate a divergence, because it only covers the most likely tokens.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from practicum import functional as F
from practicum.core.waits import show_wait
from practicum.losses import compare_signals, read_tokens
from practicum.losses.passes import (
    build_score_requests,
    group_rows_into_passes,
    pack_signals,
)
from practicum.objective import Full, Sampled
from practicum.ports import SamplingClient, Teacher
from practicum.statistics import Estimate, estimate_mean
from practicum.statistics.heldout import TokenTrace
from practicum.text import Renderer
from practicum.training.forensics import choose_traced, trace
from practicum.types import Datum, Rollout, TeacherSignal

COMPARED_TOKENS = 128
"""The number of tokens with full distributions that are compared at once."""

COMPARED_TEXTS_TOKENS = 1024
"""The number of tokens, including prompts, of the texts that are compared in one pass."""

Columns = tuple[Float[Tensor, " T"] | None, Float[Tensor, " T"]]
"""The divergence (None if the teacher's signal is empty) and the student's entropy at each token."""


@dataclass(frozen=True, slots=True)
class TeacherComparison:
    """The mean student entropy and reverse KL per token, and the traced answers.

    `entropy` and `divergence` are exact, on the given answers; without full distributions they are
    None, and the estimates are computed on answers at temperature 1.
    """

    entropy: float | None = None
    divergence: float | None = None
    entropy_estimate: Estimate | None = None
    divergence_estimate: Estimate | None = None
    traces: list[TokenTrace] = field(default_factory=list)


@torch.no_grad()
def compare_with_teacher(
    client: SamplingClient,
    teacher: Teacher,
    rollouts: Sequence[Rollout],
    renderer: Renderer,
    draw_samples: Callable[[], Sequence[Rollout]],
) -> TeacherComparison:
    """Compare student and teacher on the rollouts if both return full distributions.

    Otherwise estimate on the rollouts that `draw_samples` returns, sampled at temperature 1.
    """
    requests = build_score_requests(rollouts, reuse=True)
    traced = choose_traced(rollouts)
    knows_student = "full" in client.capabilities.signals
    student_signals = client.score(requests, Full() if knows_student else Sampled())
    if knows_student and "full" in teacher.capabilities.signals:
        teacher_signals = teacher.score(rollouts, Full())
        divergences, entropies = _compare_answers(
            rollouts, student_signals, teacher_signals, _compare_distributions
        )
        signals = list(zip(student_signals, teacher_signals, strict=True))
        traces = [trace(rollouts[index], *signals[index], renderer) for index in traced]
        # Many signals share a head, and its weights may be loaded only for this comparison.
        heads = {head.key: head for _, teacher_signal in signals for head in teacher_signal.heads}
        for head in heads.values():
            head.release()
        return TeacherComparison(
            entropy=_average(entropies), divergence=_average(divergences), traces=traces
        )
    entropy = None
    if knows_student:
        silent = [TeacherSignal()] * len(rollouts)
        entropy = _average(
            _compare_answers(rollouts, student_signals, silent, _compare_distributions)[1]
        )
    traced_answers = teacher.score([rollouts[index] for index in traced], Sampled())
    traces = [
        trace(rollouts[index], student_signals[index], answer, renderer)
        for index, answer in zip(traced, traced_answers, strict=True)
    ]
    samples = draw_samples()
    prompts = [rollout.prompt.id for rollout in samples]
    divergences, entropies = _compare_answers(
        samples,
        client.score(build_score_requests(samples, reuse=True), Sampled()),
        teacher.score(samples, Sampled()),
        _compare_sampled_tokens,
    )
    return TeacherComparison(
        entropy=entropy,
        entropy_estimate=None if knows_student else estimate_mean(entropies, prompts),
        divergence_estimate=estimate_mean(divergences, prompts),
        traces=traces,
    )


def _average(columns: Sequence[Float[Tensor, " _"]]) -> float | None:
    """Return the mean over the tokens of all answers, or None without any token."""
    tokens = torch.cat(list(columns)) if columns else torch.zeros(0)
    return tokens.mean().item() if len(tokens) else None


def _compare_answers(
    rollouts: Sequence[Rollout],
    student_signals: Sequence[TeacherSignal],
    teacher_signals: Sequence[TeacherSignal],
    compare: Callable[[TeacherSignal, TeacherSignal, Tensor], Columns],
) -> tuple[list[Float[Tensor, " _"]], list[Float[Tensor, " _"]]]:
    """Return for each answer the divergence at its supervised tokens that the teacher knows, and
    the student's entropy at all of its supervised tokens.
    """
    divergences, entropies = ([torch.zeros(0, dtype=torch.float64)] * len(rollouts) for _ in "12")
    datums = list(map(Datum, rollouts, teacher_signals, student_signals))
    with show_wait("comparisons with the teacher", len(rollouts)) as wait:
        # Combine answers, because a matrix product with the few tokens of one answer is inefficient.
        for (rows,) in group_rows_into_passes(datums, COMPARED_TEXTS_TOKENS, sys.maxsize):
            part = [rollouts[row] for row in rows]
            student, teacher = (
                pack_signals([signals[row] for row in rows], part)
                for signals in (student_signals, teacher_signals)
            )
            counts = [int(rollout.loss_mask.sum()) for rollout in part]
            tokens = torch.cat([rollout.tokens[rollout.loss_mask] for rollout in part])
            divergence, entropy = compare(student, teacher, tokens)
            unknown = teacher.unknown_tokens
            is_known = torch.ones(len(tokens), dtype=torch.bool)
            if unknown is not None:
                is_known = ~unknown.cpu()
            for position, row in enumerate(rows):
                of_row = slice(sum(counts[:position]), sum(counts[: position + 1]))
                entropies[row] = entropy.double().cpu()[of_row]
                if divergence is not None:
                    divergences[row] = divergence.double().cpu()[of_row][is_known[of_row]]
            wait.advance(len(rows))
    return divergences, entropies


def _compare_distributions(
    student_signal: TeacherSignal, teacher_signal: TeacherSignal, tokens: Tensor
) -> Columns:
    """Return reverse KL and entropy from full distributions."""
    compared = compare_signals(
        (student_signal, teacher_signal), tokens, COMPARED_TOKENS, ("reverse_kl", "student_entropy")
    )
    assert compared.student_entropy is not None, "the student's own client gives its hidden states"
    return compared.reverse_kl, compared.student_entropy


def _compare_sampled_tokens(
    student_signal: TeacherSignal, teacher_signal: TeacherSignal, _: Tensor
) -> Columns:
    """Estimate reverse KL and entropy from the sampled tokens, with one sample per token."""
    assert student_signal.logprobs is not None, "the student's own client was asked for them"
    logprobs = read_tokens(teacher_signal, slice(None)).logprobs
    divergence = None if logprobs is None else F.k1(student_signal.logprobs, logprobs)
    return divergence, -student_signal.logprobs
