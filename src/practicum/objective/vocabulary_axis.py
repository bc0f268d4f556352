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
from practicum.errors import TeacherError
from practicum.functional.divergences import DIVERGENCES
from practicum.functional.support import floor_buckets
from practicum.objective.distribution import TeacherDistribution
from practicum.objective.signal_call import SignalCall, TopK
from practicum.objective.spec import Objective, Term
from practicum.objective.support import share_pair, share_support
from practicum.objective.tokens import TermValues, TokenBatch


def compute_term_values(
    student: Float[Tensor, "T V"],
    teacher: TeacherDistribution,
    batch: TokenBatch,
    objective: Objective,
    reference: TeacherDistribution | None = None,
) -> list[TermValues]:
    """Return one `TermValues` a term, from the log-probabilities at the same T positions."""
    signals = _Signals(teacher, reference or TeacherDistribution())
    supports = [_share_support(term, student, signals) for term in objective.losses]
    logprobs = F.gather_logprobs(student, batch.tokens)
    with torch.no_grad():
        student_entropy = F.entropy(student)
    divergences = [
        _compute_divergence(term, *support, batch.tokens)
        for term, support in zip(objective.losses, supports, strict=True)
    ]
    reverse_kl = _compute_reverse_kl(objective, student, teacher, logprobs, divergences)
    values = []
    for term, divergence, support in zip(objective.losses, divergences, supports, strict=True):
        folded, signals = support
        full = signals.of(term).full
        loss_value, teacher_logprobs = logprobs, None
        is_scored = signals.can_answer(term)
        if is_scored:
            loss_value = _compute_loss_value(term, folded, signals, batch, logprobs, divergence)
            teacher_logprobs = _gather_target_logprobs(term, folded, signals, batch.tokens)
        unknown = signals.find_unknown(term)
        distribution = teacher if term.against == "teacher" else reference or TeacherDistribution()
        logits, state_values = compute_values(term, distribution, teacher_logprobs)
        term_values = TermValues(
            loss_value=loss_value,
            is_scored=mark_scored(logprobs, unknown, is_scored=is_scored),
            logprobs=logprobs.detach(),
            teacher_logprobs=forget_unknown(teacher_logprobs, unknown),
            divergence=None if divergence is None else divergence.detach(),
            student_entropy=student_entropy,
            teacher_entropy=None if full is None else F.entropy(full),
            reverse_kl=reverse_kl,
            teacher_rank=compute_teacher_rank(term, full, batch.tokens),
            teacher_logits=logits,
            teacher_values=state_values,
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

    def find_unknown(self, term: Term) -> Tensor | None:
        """Return True at the tokens that a model which the term asks does not have, or None."""
        if not term.needs_signal:
            return None
        signals = [self.of(term), *([self.reference] if term.needs_reference else [])]
        marks = [signal.unknown for signal in signals if signal.unknown is not None]
        return torch.stack(marks).any(dim=0) if marks else None


def mark_scored(logprobs: Tensor, unknown: Tensor | None, *, is_scored: bool) -> Tensor:
    """Return True at the tokens at which a term has its signal: at none, or all that are known."""
    scored = torch.full_like(logprobs, is_scored, dtype=torch.bool)
    return scored if unknown is None else scored & ~unknown


def forget_unknown(values: Tensor | None, unknown: Tensor | None) -> Tensor | None:
    """Return numbers about the sampled tokens, NaN at the unknown ones."""
    if values is None or unknown is None:
        return values
    return values.masked_fill(unknown, torch.nan)


def _share_support(term: Term, student: Tensor, signals: _Signals) -> tuple[Tensor, _Signals]:
    """Return the distributions that a term compares, over the tokens that all its models have."""
    if term.signal.unshared:
        # They are of all tokens, those in the bucket included.
        return student, signals
    parts = [TeacherDistribution(student)]
    if term.needs_signal:
        parts.append(signals.of(term))
    if term.needs_reference:
        parts.append(signals.reference)
    folded = share_support(parts)
    if folded[0].full is None or folded[0].outside is None:
        return student, signals
    teacher = folded[1] if term.against == "teacher" else signals.teacher
    reference = folded[-1] if term.needs_reference else signals.reference
    return folded[0].full, _Signals(teacher, reference)


def _compute_loss_value(
    term: Term,
    student: Tensor,
    signals: _Signals,
    batch: TokenBatch,
    logprobs: Tensor,
    divergence: Tensor | None,
) -> Tensor:
    """Return the number at each token that the token side's coefficient multiplies."""
    if term.signal.alone:
        return -F.entropy(student)
    if term.signal.label or term.on_sampled_token:
        return compute_token_value(term, logprobs)
    if term.signal.drawn:
        return _compute_monte_carlo_value(term, student, signals.of(term), batch)
    if not term.gradient.pathwise:
        return _sum_over_candidates(term, student, signals.of(term))
    assert divergence is not None, (
        "the capability check lets no pathwise term through without candidates"
    )
    return _clip_loss(term, divergence)


def compute_token_value(term: Term, logprobs: Tensor) -> Tensor:
    """Return the value of a term about one token: its log-probability, negated for a label."""
    return -logprobs if term.signal.label else logprobs


def _clip_loss(term: Term, divergence: Tensor) -> Tensor:
    if not term.clip.clips_losses:
        return divergence
    return torch.where(term.clip.find_clipped(divergence), divergence.detach(), divergence)


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
    advantage = term.clip.bound(term.compute_advantage(student_part.detach(), teacher_part))
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
def compute_values(
    term: Term, teacher: TeacherDistribution, teacher_logprobs: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the teacher's raw logits of the sampled tokens and the values of the states.

    None twice if the term has no returns of them, or no signal. Raises TeacherError if the teacher
    gave log-probabilities only.
    """
    if not term.signal.step or teacher_logprobs is None:
        return None, None
    if teacher.full is None or teacher.level is None:
        raise TeacherError(
            f"signal 'logits' reads the {term.against}'s raw logits, and it gave log-probabilities "
            "only; write signal: sampled with estimator: score_function(gamma=1)"
        )
    return teacher_logprobs + teacher.level, term.signal.compute_state_values(teacher)


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
        if teacher.logprobs is None:
            return None
        return forget_unknown(F.k1(logprobs, teacher.logprobs), teacher.unknown)
    for term, divergence in zip(objective.losses, divergences, strict=True):
        plain = term.signal.whole and term.target.is_plain and term.against == "teacher"
        if plain and term.divergence.name == "reverse_kl" and divergence is not None:
            return divergence.detach()
    return F.reverse_kl(*share_pair(student, teacher))


@torch.no_grad()
def read_target(
    term: Term,
    student: Float[Tensor, "T V"],
    teacher: Float[Tensor, "T V"],
    reference: Float[Tensor, "T V"] | None,
) -> tuple[Float[Tensor, "T V"], Float[Tensor, " T"] | None]:
    """Return the target of a term about the teacher, and the reverse KL if it is of candidates only.

    The teacher takes the place of a target that is one token, to which there is no reverse KL, and
    of one whose reference is missing.
    """
    signals = _Signals(TeacherDistribution(teacher), TeacherDistribution(reference))
    restricted = compare_candidates(term.signal, student, signals.teacher)
    if restricted is not None:
        return teacher, restricted
    if term.target.is_label or (term.needs_reference and reference is None):
        return teacher, None
    return _build_target(term, student, signals)[0], None


def measures_teacher(term: Term) -> bool:
    """Return True if the target of a term is the teacher, or the label for which it stands in."""
    return term.targets_teacher or term.target.is_label


def cuts_to_candidates(signal: SignalCall) -> bool:
    """Return True if the loss compares distributions over the candidates of a signal."""
    return isinstance(signal, TopK) and signal.tail in ("bucket", "renorm")


@torch.no_grad()
def compare_candidates(
    signal: SignalCall, student: Float[Tensor, "T V"], teacher: TeacherDistribution
) -> Float[Tensor, " T"] | None:
    """Return the reverse KL of the candidates that a signal chooses, cut as the loss cuts them.

    None if the signal chooses none, or cuts them to something that is no distribution.
    """
    if not cuts_to_candidates(signal):
        return None
    return F.reverse_kl(*_restrict(signal, student, teacher, signal.tails)[2:])


def _build_target(term: Term, student: Tensor, signals: _Signals) -> tuple[Tensor, Tensor | None]:
    """Return the target's log-probabilities, and the divisor of the divergence or None."""
    teacher = signals.of(term).full
    assert teacher is not None, "a target is made of whole distributions"
    return term.target.build(teacher, student, signals.reference.full)


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
    if teacher.full is not None and not (target.is_product and term.signal.sampled):
        return F.gather_logprobs(_build_target(term, student, signals)[0], tokens)
    teacher_logprobs = _gather_token_logprobs(teacher, tokens)
    if teacher_logprobs is None or not target.is_product or target.is_plain:
        return teacher_logprobs
    of_student = F.gather_logprobs(student, tokens)
    of_reference = _gather_token_logprobs(signals.reference, tokens)
    return target.combine(teacher_logprobs, of_student, of_reference)


def _gather_token_logprobs(teacher: TeacherDistribution, tokens: Tensor) -> Tensor | None:
    if teacher.full is None:
        return teacher.logprobs
    logprobs = F.gather_logprobs(teacher.full, tokens)
    # Finite at tokens that the teacher does not have: their coefficient is 0, and so is 0 times it.
    return logprobs if teacher.unknown is None else logprobs.masked_fill(teacher.unknown, 0.0)


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
    student = student if term.gradient.pathwise else student.detach()
    if term.signal.compares:
        return term.signal.compare(term.build_comparison(student, teacher, tokens))
    if term.signal.whole and teacher.full is not None:
        with torch.no_grad():
            target, size = _build_target(term, student, signals)
        if teacher.outside is not None:
            student, target = floor_buckets([student, target])
        divergence = _sum_contributions(term, student, target)
        return divergence if size is None else divergence / size
    ids, valid, student_part, teacher_part = _restrict(
        term.signal, student, teacher, term.signal.tails
    )
    divergence = _sum_contributions(term, student_part, teacher_part)
    if "sampled" not in term.signal.tails:
        return divergence
    is_known = ((ids == tokens[:, None]) & valid).any(dim=-1)
    unknown = signals.find_unknown(term)
    if unknown is not None:
        # Such a token is in no tail; token 0 stands for it, so that all numbers are finite.
        is_known, tokens = is_known | unknown, tokens.masked_fill(unknown, 0)
    return divergence + _compute_tail(term, student, signals, tokens, is_known)


def _sum_contributions(term: Term, student: Tensor, target: Tensor) -> Tensor:
    """Return the divergence of two sets of candidates; what exceeds the clip is constant."""
    parts = DIVERGENCES[term.divergence.name].contributions(student, target, term.parameter)
    return term.clip.clip_entries(parts).sum(dim=-1)


def _restrict(
    signal: SignalCall, student: Tensor, teacher: TeacherDistribution, tails: tuple[str, str]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_student, of_teacher = tails
    if teacher.full is None:
        assert teacher.topk_ids is not None and teacher.topk_logprobs is not None
        ids, logprobs = teacher.topk_ids, teacher.topk_logprobs
        valid = torch.isfinite(logprobs)
        teacher_part = F.restrict_candidates(logprobs, valid, of_teacher)
    elif teacher.outside is None:
        with torch.no_grad():
            ids, valid = F.candidates(student, teacher.full, signal.candidates, signal.chooser)
        teacher_part = F.restrict(teacher.full, ids, valid, of_teacher)
    else:
        return _restrict_folded(signal, student, teacher.full, teacher.outside, tails)
    return ids, valid, F.restrict(student, ids, valid, of_student), teacher_part


def _restrict_folded(
    signal: SignalCall, student: Tensor, teacher: Tensor, outside: Tensor, tails: tuple[str, str]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the same for folded distributions: candidates are tokens that both models have."""
    with torch.no_grad():
        inside = student[:, :-1], teacher[:, :-1]
        ids, valid = F.candidates(*inside, signal.candidates, signal.chooser)
        # More candidates than common tokens take in tokens that are not common.
        valid = valid & ~torch.isin(ids, outside)
    pair = [
        F.restrict(part, ids, valid, tail, len(outside))
        for part, tail in zip((student, teacher), tails, strict=True)
    ]
    if tails == ("bucket", "bucket"):
        pair = floor_buckets(pair)
    return ids, valid, pair[0], pair[1]


def _compute_tail(
    term: Term, student: Tensor, signals: _Signals, tokens: Tensor, is_known: Tensor
) -> Tensor:
    """Return a zero whose gradient is that of the tail's divergence in expectation.

    The sampled token carries it, unless the candidates already account for that token.
    """
    teacher_logprobs = _gather_target_logprobs(term, student, signals, tokens)
    assert teacher_logprobs is not None
    logprobs = F.gather_logprobs(student, tokens)
    divergence = DIVERGENCES[term.divergence.name]
    coefficient = divergence.tail_coefficient(logprobs.detach(), teacher_logprobs, term.parameter)
    coefficient = torch.where(is_known, torch.zeros_like(coefficient), coefficient)
    return coefficient * (logprobs - logprobs.detach())
