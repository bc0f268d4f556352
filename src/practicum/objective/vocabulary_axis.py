"""The logit side: one differentiable number a token, from the log-probabilities of student and teacher.

It is all that needs the vocabulary axis, and it works on one chunk of tokens at a time. The token side turns the numbers that it
leaves behind into one coefficient a token (`practicum.objective.token_axis`); the loss is the sum of their products, so chunks and
micro-batches can be added up in any order. Autograd differentiates these numbers; where the gradient can be written down, local
training takes the fused twin in `practicum.objective.closed_form`.
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
    """One `TermValues` a term, from the log-probabilities of the same T positions."""
    said = _Signals(teacher, reference or TeacherDistribution())
    logprobs = F.gather_logprobs(student, batch.tokens)
    with torch.no_grad():
        student_entropy = F.entropy(student)
    divergences = [_divergence(term, student, said, batch.tokens) for term in objective.losses]
    reverse_kl = _yardstick(objective, student, teacher, logprobs, divergences)
    values = []
    for term, divergence in zip(objective.losses, divergences, strict=True):
        of = said.of(term)
        known = said.answer(term)
        values.append(
            TermValues(
                value=_value(term, student, said, batch, logprobs, divergence)
                if known
                else logprobs,
                answered=torch.full_like(logprobs, known, dtype=torch.bool),
                logprobs=logprobs.detach(),
                teacher_logprobs=_teacher_logprobs(term, student, said, batch.tokens)
                if known
                else None,
                divergence=None if divergence is None else divergence.detach(),
                student_entropy=student_entropy,
                teacher_entropy=None if of.full is None else F.entropy(of.full),
                reverse_kl=reverse_kl,
                teacher_rank=teacher_rank(term, of.full, batch.tokens),
            )
        )
    return values


@dataclass(frozen=True, slots=True)
class _Signals:
    """What teacher and reference said about the same tokens."""

    teacher: TeacherDistribution
    reference: TeacherDistribution

    def of(self, term: Term) -> TeacherDistribution:
        """The one that the term is about."""
        return self.teacher if term.against == "teacher" else self.reference

    def answer(self, term: Term) -> bool:
        """Whether the term has what it asks for."""
        if term.asks and self.of(term).silent:
            return False
        return not (term.asks_reference and self.reference.silent)


def _value(
    term: Term,
    student: Tensor,
    said: _Signals,
    batch: TokenBatch,
    logprobs: Tensor,
    divergence: Tensor | None,
) -> Tensor:
    """The number at each token whose gradient, times the token side's coefficient, is the loss's."""
    if term.signal.label or term.on_sampled_token:
        return value_of_token(term, logprobs)
    if term.signal.drawn:
        return _compute_monte_carlo_value(term, student, said.of(term), batch)
    if not isinstance(term.gradient, Pathwise):
        return _over_candidates(term, student, said.of(term))
    assert divergence is not None, (
        "the capability check lets no pathwise term through without candidates"
    )
    return _clipped_loss(term, divergence)


def value_of_token(term: Term, logprobs: Tensor) -> Tensor:
    """Return the value of a term that is about one token: its log-probability, or minus that where the token is a label."""
    return -logprobs if term.signal.label else logprobs


def _clipped_loss(term: Term, value: Tensor) -> Tensor:
    if not isinstance(term.clip, ClipLoss):
        return value
    return torch.where(value > term.clip.maximum, value.detach(), value)


def _compute_monte_carlo_value(
    term: Term, student: Tensor, teacher: TeacherDistribution, batch: TokenBatch
) -> Tensor:
    """The score function over tokens drawn from the student at each state (AsyncOPD, arXiv 2606.24143)."""
    assert teacher.full is not None, "drawn tokens are scored from the whole distribution"
    with torch.no_grad():
        cumulative = student.double().exp().cumsum(dim=-1)
        ids = torch.searchsorted(
            cumulative,
            batch.draws[:, : term.signal.drawn].to(cumulative) * cumulative[:, -1:],
            right=True,
        )
        ids = ids.clamp_max(student.shape[-1] - 1)
    drawn = student.gather(-1, ids)
    advantage = DIVERGENCES[term.divergence.name].advantage(
        drawn.detach(), teacher.full.gather(-1, ids), term.parameter
    )
    return -(advantage * drawn).mean(dim=-1)


def _over_candidates(term: Term, student: Tensor, teacher: TeacherDistribution) -> Tensor:
    """The score function over the candidates, each weighted by its renormalised student probability (2604.13016)."""
    _, valid, student_part, teacher_part = _candidates(
        term.signal, student, teacher, ("drop", "drop")
    )
    share = torch.softmax(student_part.detach(), dim=-1)
    advantage = DIVERGENCES[term.divergence.name].advantage(
        student_part.detach(), teacher_part, term.parameter
    )
    inside = valid & torch.isfinite(student_part)
    return -torch.where(
        inside, share * advantage * student_part.masked_fill(~inside, 0.0), 0.0
    ).sum(dim=-1)


@torch.no_grad()
def teacher_rank(term: Term, teacher: Tensor | None, tokens: Tensor) -> Tensor | None:
    """How many tokens the teacher finds likelier than the sampled one, where the weights ask."""
    if teacher is None or "teacher_rank" not in term.weighs_by:
        return None
    return (teacher > F.gather_logprobs(teacher, tokens)[:, None]).sum(dim=-1)


@torch.no_grad()
def _yardstick(
    objective: Objective,
    student: Tensor,
    teacher: TeacherDistribution,
    logprobs: Tensor,
    divergences: Sequence[Tensor | None],
) -> Tensor | None:
    """Reverse KL to the teacher itself: exact where its distribution is known, else by the sampled token (k1)."""
    if teacher.full is None:
        return None if teacher.logprobs is None else F.k1(logprobs, teacher.logprobs)
    for term, divergence in zip(objective.losses, divergences, strict=True):
        plain = term.signal.whole and term.target == TeacherTarget() and term.against == "teacher"
        if plain and term.divergence.name == "reverse_kl" and divergence is not None:
            return divergence.detach()
    return F.reverse_kl(student, teacher.full)


def _target(term: Term, student: Tensor, said: _Signals) -> tuple[Tensor, Tensor | None]:
    """The target's log-probabilities, and what the divergence is divided by at each position, if anything."""
    target, teacher = term.target, said.of(term).full
    assert teacher is not None, "a target is made of whole distributions"
    if isinstance(target, LogLinear):
        if target.plain:
            return teacher, None
        parts = [
            (target.teacher, teacher),
            (target.student, student.detach()),
            (target.reference, said.reference.full),
        ]
        return F.log_linear(
            [(share, part) for share, part in parts if part is not None and share != 0.0]
        ), None
    if isinstance(target, Mixture):
        return F.mixture(
            [(target.teacher, teacher), (1.0 - target.teacher, student.detach())]
        ), None
    if isinstance(target, Contrast):
        assert said.reference.full is not None
        return F.contrast(teacher, said.reference.full, target.scale, target.floor)
    if target.temperature == 0.0:
        return F.greedy(teacher), None
    return (teacher if target.temperature == 1.0 else F.temper(teacher, target.temperature)), None


@torch.no_grad()
def _teacher_logprobs(term: Term, student: Tensor, said: _Signals, tokens: Tensor) -> Tensor | None:
    """The target's log-probability of the sampled token, up to a constant of the state for `log_linear`."""
    if not term.asks:
        return None
    teacher, target = said.of(term), term.target
    if teacher.full is not None and not (isinstance(target, LogLinear) and term.signal.sampled):
        return F.gather_logprobs(_target(term, student, said)[0], tokens)
    own = _token_logprobs(teacher, tokens)
    if own is None or not isinstance(target, LogLinear) or target.plain:
        return own
    reference = _token_logprobs(said.reference, tokens)
    parts = [
        (target.teacher, own),
        (target.student, F.gather_logprobs(student, tokens)),
        (target.reference, reference),
    ]
    return torch.stack(
        [share * part for share, part in parts if part is not None and share != 0.0]
    ).sum(dim=0)


def _token_logprobs(teacher: TeacherDistribution, tokens: Tensor) -> Tensor | None:
    return teacher.logprobs if teacher.full is None else F.gather_logprobs(teacher.full, tokens)


def _divergence(term: Term, student: Tensor, said: _Signals, tokens: Tensor) -> Tensor | None:
    """The divergence at each position, differentiable where it is the loss; None where the signal is no distribution."""
    teacher = said.of(term)
    if not term.signal.measures or not said.answer(term):
        return None
    student = student if isinstance(term.gradient, Pathwise) else student.detach()
    if term.signal.whole and teacher.full is not None:
        with torch.no_grad():
            target, size = _target(term, student, said)
        value = _sum_contributions(term, student, target)
        return value if size is None else value / size
    ids, valid, student_part, teacher_part = _candidates(
        term.signal, student, teacher, term.signal.tails
    )
    value = _sum_contributions(term, student_part, teacher_part)
    if "sampled" not in term.signal.tails:
        return value
    return value + _sampled_tail(term, student, said, tokens, (ids == tokens[:, None]) & valid)


def _sum_contributions(term: Term, student: Tensor, target: Tensor) -> Tensor:
    """The divergence of two sets of candidates, of which those over the clip are held constant."""
    parts = DIVERGENCES[term.divergence.name].contributions(student, target, term.parameter)
    if isinstance(term.clip, ClipEntries):
        parts = torch.where(parts > term.clip.maximum, parts.detach(), parts)
    return parts.sum(dim=-1)


def _candidates(
    signal: Signal, student: Tensor, teacher: TeacherDistribution, tails: tuple[str, str]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_student, of_teacher = tails
    if teacher.full is not None:
        with torch.no_grad():
            ids, valid = F.candidates(student, teacher.full, signal.candidates, signal.chooser)
        return (
            ids,
            valid,
            F.restrict(student, ids, valid, of_student),
            F.restrict(teacher.full, ids, valid, of_teacher),
        )
    assert teacher.topk_ids is not None and teacher.topk_logprobs is not None
    ids, logprobs = teacher.topk_ids, teacher.topk_logprobs
    valid = torch.isfinite(logprobs)
    return (
        ids,
        valid,
        F.restrict(student, ids, valid, of_student),
        F.restrict_candidates(logprobs, valid, of_teacher),
    )


def _sampled_tail(
    term: Term, student: Tensor, said: _Signals, tokens: Tensor, is_candidate: Tensor
) -> Tensor:
    """A zero whose gradient is that of the tail's divergence in expectation, carried by the sampled token."""
    teacher_logprobs = _teacher_logprobs(term, student, said, tokens)
    assert teacher_logprobs is not None
    logprobs = F.gather_logprobs(student, tokens)
    divergence = DIVERGENCES[term.divergence.name]
    coefficient = divergence.tail_coefficient(logprobs.detach(), teacher_logprobs, term.parameter)
    coefficient = torch.where(is_candidate.any(dim=-1), torch.zeros_like(coefficient), coefficient)
    return coefficient * (logprobs - logprobs.detach())
