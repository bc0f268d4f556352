"""Compute the logit side of an objective: one differentiable number a token.

It comes from the log-probabilities of student and teacher, and is all that needs the vocabulary
axis; it works on one chunk of tokens at a time. From the detached statistics the token side
computes one coefficient a token (`practicum.objective.token_axis`). The loss is the sum of the
products, so chunks and micro-batches can be added in any order. Autograd differentiates these
numbers; if the gradient has a closed form, local training uses `practicum.objective.closed_form`
instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from practicum import functional as F
from practicum.functional.divergences import DIVERGENCES
from practicum.objective.choices import (
    ClipEntries,
    ClipLoss,
    Contrast,
    LogLinear,
    Mixture,
    Signal,
    TeacherTarget,
)
from practicum.objective.estimators import Pathwise
from practicum.objective.spec import Objective, Term
from practicum.objective.tokens import TeacherDistribution, TermValues, TokenBatch


def compute_term_values(
    student: Float[Tensor, "T V"],
    teacher: TeacherDistribution,
    batch: TokenBatch,
    objective: Objective,
    reference: TeacherDistribution | None = None,
) -> list[TermValues]:
    """Return one `TermValues` a term, from the log-probabilities at the same T positions."""
    signals = _Signals(teacher, reference or TeacherDistribution())
    logprobs = F.gather_logprobs(student, batch.tokens)
    with torch.no_grad():
        student_entropy = F.entropy(student)
    divergences = [
        _compute_divergence(term, student, signals, batch.tokens) for term in objective.losses
    ]
    reverse_kl = _compute_reverse_kl(objective, student, teacher, logprobs, divergences)
    values = []
    for term, divergence in zip(objective.losses, divergences, strict=True):
        full = signals.of(term).full
        loss_value, teacher_logprobs = logprobs, None
        is_scored = signals.can_answer(term)
        if is_scored:
            loss_value = _compute_loss_value(term, student, signals, batch, logprobs, divergence)
            teacher_logprobs = _gather_target_logprobs(term, student, signals, batch.tokens)
        term_values = TermValues(
            loss_value=loss_value,
            is_scored=torch.full_like(logprobs, is_scored, dtype=torch.bool),
            logprobs=logprobs.detach(),
            teacher_logprobs=teacher_logprobs,
            divergence=None if divergence is None else divergence.detach(),
            student_entropy=student_entropy,
            teacher_entropy=None if full is None else F.entropy(full),
            reverse_kl=reverse_kl,
            teacher_rank=compute_teacher_rank(term, full, batch.tokens),
        )
        values.append(term_values)
    return values


@dataclass(frozen=True, slots=True)
class _Signals:
    """The signals of teacher and reference at the same tokens."""

    teacher: TeacherDistribution
    reference: TeacherDistribution

    def of(self, term: Term) -> TeacherDistribution:
        """Return the signal that the term is about."""
        return self.teacher if term.against == "teacher" else self.reference

    def can_answer(self, term: Term) -> bool:
        """Return True if the signals that the term needs are there."""
        if term.needs_signal and self.of(term).is_empty:
            return False
        return not (term.needs_reference and self.reference.is_empty)


def _compute_loss_value(
    term: Term,
    student: Tensor,
    signals: _Signals,
    batch: TokenBatch,
    logprobs: Tensor,
    divergence: Tensor | None,
) -> Tensor:
    """Return the number at each token that the token side's coefficient multiplies."""
    if term.signal.label or term.on_sampled_token:
        return compute_token_value(term, logprobs)
    if term.signal.drawn:
        return _compute_monte_carlo_value(term, student, signals.of(term), batch)
    if not isinstance(term.gradient, Pathwise):
        return _sum_over_candidates(term, student, signals.of(term))
    assert divergence is not None, (
        "the capability check lets no pathwise term through without candidates"
    )
    return _clip_loss(term, divergence)


def compute_token_value(term: Term, logprobs: Tensor) -> Tensor:
    """Return the value of a term about one token: its log-probability, negated for a label."""
    return -logprobs if term.signal.label else logprobs


def _clip_loss(term: Term, divergence: Tensor) -> Tensor:
    if not isinstance(term.clip, ClipLoss):
        return divergence
    return torch.where(divergence > term.clip.maximum, divergence.detach(), divergence)


def _compute_monte_carlo_value(
    term: Term, student: Tensor, teacher: TeacherDistribution, batch: TokenBatch
) -> Tensor:
    """Return the score function over tokens drawn from the student (AsyncOPD 2606.24143)."""
    assert teacher.full is not None, "drawn tokens are scored from the whole distribution"
    with torch.no_grad():
        cumulative = student.double().exp().cumsum(dim=-1)
        # The last entry of a rounded sum is not exactly 1, so the draws are scaled to it.
        draws = batch.draws[:, : term.signal.drawn].to(cumulative) * cumulative[:, -1:]
        ids = torch.searchsorted(cumulative, draws, right=True)
        ids = ids.clamp_max(student.shape[-1] - 1)
    logprobs = student.gather(-1, ids)
    advantage = term.compute_advantage(logprobs.detach(), teacher.full.gather(-1, ids))
    return -(advantage * logprobs).mean(dim=-1)


def _sum_over_candidates(term: Term, student: Tensor, teacher: TeacherDistribution) -> Tensor:
    """Return the score function summed over the candidates (2604.13016).

    Each candidate is weighted by its renormalised student probability.
    """
    _, valid, student_part, teacher_part = _restrict(
        term.signal, student, teacher, ("drop", "drop")
    )
    share = torch.softmax(student_part.detach(), dim=-1)
    advantage = term.compute_advantage(student_part.detach(), teacher_part)
    # An impossible candidate has log-probability -inf, whose product with 0 would be NaN.
    inside = valid & torch.isfinite(student_part)
    return -torch.where(
        inside, share * advantage * student_part.masked_fill(~inside, 0.0), 0.0
    ).sum(dim=-1)


@torch.no_grad()
def compute_teacher_rank(term: Term, teacher: Tensor | None, tokens: Tensor) -> Tensor | None:
    """Return how many tokens the teacher finds likelier than the sampled one.

    None if the weights do not need it.
    """
    if teacher is None or "teacher_rank" not in term.weighs_by:
        return None
    return (teacher > F.gather_logprobs(teacher, tokens)[:, None]).sum(dim=-1)


@torch.no_grad()
def _compute_reverse_kl(
    objective: Objective,
    student: Tensor,
    teacher: TeacherDistribution,
    logprobs: Tensor,
    divergences: Sequence[Tensor | None],
) -> Tensor | None:
    """Return reverse KL to the unmodified teacher, or None without a signal.

    It is exact if the teacher's distribution is known, else an estimate from the sampled token
    (k1).
    """
    if teacher.full is None:
        return None if teacher.logprobs is None else F.k1(logprobs, teacher.logprobs)
    for term, divergence in zip(objective.losses, divergences, strict=True):
        plain = term.signal.whole and term.target == TeacherTarget() and term.against == "teacher"
        if plain and term.divergence.name == "reverse_kl" and divergence is not None:
            return divergence.detach()
    return F.reverse_kl(student, teacher.full)


def _build_target(term: Term, student: Tensor, signals: _Signals) -> tuple[Tensor, Tensor | None]:
    """Return the target's log-probabilities, and the divisor of the divergence or None."""
    target, teacher = term.target, signals.of(term).full
    assert teacher is not None, "a target is made of whole distributions"
    if isinstance(target, LogLinear):
        if target.is_teacher:
            return teacher, None
        factors = _drop_unused(
            (target.teacher, teacher),
            (target.student, student.detach()),
            (target.reference, signals.reference.full),
        )
        return F.log_linear(factors), None
    if isinstance(target, Mixture):
        parts = [(target.teacher, teacher), (1.0 - target.teacher, student.detach())]
        return F.mixture(parts), None
    if isinstance(target, Contrast):
        assert signals.reference.full is not None
        return F.contrast(teacher, signals.reference.full, target.scale, target.floor)
    if target.temperature == 0.0:
        return F.greedy(teacher), None
    return (teacher if target.temperature == 1.0 else F.temper(teacher, target.temperature)), None


@torch.no_grad()
def _gather_target_logprobs(
    term: Term, student: Tensor, signals: _Signals, tokens: Tensor
) -> Tensor | None:
    """Return the target's log-probability of each sampled token.

    For `log_linear` it lacks a constant of the state.
    """
    if not term.needs_signal:
        return None
    teacher, target = signals.of(term), term.target
    if teacher.full is not None and not (isinstance(target, LogLinear) and term.signal.sampled):
        return F.gather_logprobs(_build_target(term, student, signals)[0], tokens)
    teacher_logprobs = _gather_token_logprobs(teacher, tokens)
    if teacher_logprobs is None or not isinstance(target, LogLinear) or target.is_teacher:
        return teacher_logprobs
    factors = _drop_unused(
        (target.teacher, teacher_logprobs),
        (target.student, F.gather_logprobs(student, tokens)),
        (target.reference, _gather_token_logprobs(signals.reference, tokens)),
    )
    return torch.stack([exponent * logprobs for exponent, logprobs in factors]).sum(dim=0)


def _drop_unused(*factors: tuple[float, Tensor | None]) -> list[tuple[float, Tensor]]:
    """Return the factors of a product of distributions that have an exponent and a distribution."""
    return [
        (exponent, logprobs)
        for exponent, logprobs in factors
        if logprobs is not None and exponent != 0.0
    ]


def _gather_token_logprobs(teacher: TeacherDistribution, tokens: Tensor) -> Tensor | None:
    return teacher.logprobs if teacher.full is None else F.gather_logprobs(teacher.full, tokens)


def _compute_divergence(
    term: Term, student: Tensor, signals: _Signals, tokens: Tensor
) -> Tensor | None:
    """Return the divergence at each position; None if the signal is no distribution.

    It is differentiable if it is the loss.
    """
    teacher = signals.of(term)
    if not term.signal.measures or not signals.can_answer(term):
        return None
    # Under other estimators the divergence is only measured, so it needs no graph.
    student = student if isinstance(term.gradient, Pathwise) else student.detach()
    if term.signal.whole and teacher.full is not None:
        with torch.no_grad():
            target, size = _build_target(term, student, signals)
        value = _sum_contributions(term, student, target)
        return value if size is None else value / size
    ids, valid, student_part, teacher_part = _restrict(
        term.signal, student, teacher, term.signal.tails
    )
    value = _sum_contributions(term, student_part, teacher_part)
    if "sampled" not in term.signal.tails:
        return value
    is_candidate = (ids == tokens[:, None]) & valid
    return value + _compute_tail(term, student, signals, tokens, is_candidate)


def _sum_contributions(term: Term, student: Tensor, target: Tensor) -> Tensor:
    """Return the divergence of two sets of candidates; what exceeds the clip is constant."""
    parts = DIVERGENCES[term.divergence.name].contributions(student, target, term.parameter)
    if isinstance(term.clip, ClipEntries):
        parts = torch.where(parts > term.clip.maximum, parts.detach(), parts)
    return parts.sum(dim=-1)


def _restrict(
    signal: Signal, student: Tensor, teacher: TeacherDistribution, tails: tuple[str, str]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_student, of_teacher = tails
    if teacher.full is None:
        assert teacher.topk_ids is not None and teacher.topk_logprobs is not None
        ids, logprobs = teacher.topk_ids, teacher.topk_logprobs
        valid = torch.isfinite(logprobs)
        teacher_part = F.restrict_candidates(logprobs, valid, of_teacher)
    else:
        with torch.no_grad():
            ids, valid = F.candidates(student, teacher.full, signal.candidates, signal.chooser)
        teacher_part = F.restrict(teacher.full, ids, valid, of_teacher)
    return ids, valid, F.restrict(student, ids, valid, of_student), teacher_part


def _compute_tail(
    term: Term, student: Tensor, signals: _Signals, tokens: Tensor, is_candidate: Tensor
) -> Tensor:
    """Return a zero whose gradient is that of the tail's divergence in expectation.

    The sampled token carries it.
    """
    teacher_logprobs = _gather_target_logprobs(term, student, signals, tokens)
    assert teacher_logprobs is not None
    logprobs = F.gather_logprobs(student, tokens)
    divergence = DIVERGENCES[term.divergence.name]
    coefficient = divergence.tail_coefficient(logprobs.detach(), teacher_logprobs, term.parameter)
    coefficient = torch.where(is_candidate.any(dim=-1), torch.zeros_like(coefficient), coefficient)
    return coefficient * (logprobs - logprobs.detach())
