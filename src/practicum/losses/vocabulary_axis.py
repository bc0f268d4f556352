"""Compute the logit side of an objective: one differentiable number per token.

It is computed from the log-probabilities of student and teacher, on one chunk of tokens at a time,
and is the only part that needs the vocabulary axis. From the detached statistics the token side
computes one coefficient per token (`practicum.losses.token_axis`). The loss is the sum of the
products, so chunks and micro-batches can be added in any order. Autograd differentiates these
numbers; if the gradient has a closed form, local training uses `practicum.losses.closed_form`
instead.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum import functional as F
from practicum.errors import TeacherError
from practicum.functional.divergences import DIVERGENCES
from practicum.functional.speculative import count_rejected
from practicum.functional.support import floor_buckets
from practicum.functional.weights import RANK_STATISTICS
from practicum.losses.support import share_pair, share_support
from practicum.losses.tokens import TermValues, TokenBatch
from practicum.objective.distribution import DrawnTokens, TeacherDistribution
from practicum.objective.signal_call import SignalCall, TopK
from practicum.objective.spec import Objective, Term
from practicum.objective.target_call import TargetCall


def compute_term_values(
    student: Float[Tensor, "T V"],
    teacher: TeacherDistribution,
    batch: TokenBatch,
    objective: Objective,
    reference: TeacherDistribution | None = None,
) -> list[TermValues]:
    """Return one `TermValues` a term, from the log-probabilities at the same T positions."""
    sides = [compile_logit_side(term) for term in objective.losses]
    return compute_values(sides, student, teacher, batch, reference)


def compute_values(
    sides: "Sequence[LogitSide]",
    student: Float[Tensor, "T V"],
    teacher: TeacherDistribution,
    batch: TokenBatch,
    reference: TeacherDistribution | None = None,
) -> list[TermValues]:
    """Return one `TermValues` a term, from the log-probabilities at the same T positions."""
    all_models = Models(student, teacher, reference or TeacherDistribution())
    models_by_term = [side.select_models(all_models) for side in sides]
    logprobs = F.gather_logprobs(student, batch.tokens)
    with torch.no_grad():
        student_entropy = F.entropy(student)
    divergences = [
        side.compute_divergence(models, batch.tokens)
        for side, models in zip(sides, models_by_term, strict=True)
    ]
    reverse_kl = _compute_reverse_kl(sides, student, teacher, logprobs, divergences)
    values = []
    for side, divergence, models in zip(sides, divergences, models_by_term, strict=True):
        full = models.subject.full
        loss_value, teacher_logprobs = logprobs, None
        is_scored = side.can_answer(models)
        if is_scored:
            loss_value = side.compute_loss(models, batch, logprobs, divergence)
            teacher_logprobs = side.read_target_logprobs(models, batch.tokens)
        unknown = side.find_unknown(models)
        distribution = all_models.reference if side.asks_reference else teacher
        logits, state_values = side.compute_state_values(distribution, teacher_logprobs)
        term_values = TermValues(
            loss_value=loss_value,
            is_scored=mark_scored(logprobs, unknown, is_scored=is_scored),
            logprobs=logprobs.detach(),
            teacher_logprobs=forget_unknown(teacher_logprobs, unknown),
            divergence=None if divergence is None else divergence.detach(),
            student_entropy=student_entropy,
            teacher_entropy=None if full is None else F.entropy(full),
            reverse_kl=reverse_kl,
            **side.rank(models.student, full, batch),
            teacher_logits=logits,
            teacher_values=state_values,
            reference_logprobs=side.read_reference_logprobs(models, batch.tokens),
        )
        values.append(term_values)
    return values


@dataclass(frozen=True, slots=True)
class Models:
    """The distributions at the same tokens; `subject` is the model that a term is about."""

    student: Float[Tensor, "T V"]
    subject: TeacherDistribution
    reference: TeacherDistribution


DivergenceFunction = Callable[[Models, Int[Tensor, " T"]], Tensor | None]
"""A function that returns each position's divergence, or None if the signal is no distribution."""

LossFunction = Callable[[Models, TokenBatch, Tensor, Tensor | None], Tensor]
"""Returns a differentiable number per token, from its log-probability and the divergence."""

TargetFunction = Callable[[Models, Int[Tensor, " T"]], Tensor | None]
"""A function that returns the target's log-probability of each token, or None without a signal."""


@dataclass(frozen=True, slots=True)
class LogitSide:
    """The functions that compute the values of a term, and the facts that decide about them.

    - asks_reference: it is about the reference instead of the teacher
    - is_shared: it compares the models on the tokens that all of them have
    - measures_teacher: its divergence is the reverse KL to the unmodified teacher
    - is_alone: its value is the student's entropy, negated
    - is_label: the value of a sampled token is its log-probability, negated
    - ranks: the teacher's ranks of tokens that its weights need
    - weighs_by_reference: its weights read the reference's log-probabilities
    """

    asks_reference: bool
    needs_signal: bool
    needs_reference: bool
    is_shared: bool
    measures_teacher: bool
    is_alone: bool
    is_label: bool
    ranks: frozenset[str]
    weighs_by_reference: bool
    signal: SignalCall
    compute_loss: LossFunction
    measure: DivergenceFunction
    read_target: TargetFunction

    def select_models(self, models: Models) -> Models:
        """Return the models that the term compares, over the tokens that all of them have.

        The subject of `models` is the teacher.
        """
        student, reference = models.student, models.reference
        subject = reference if self.asks_reference else models.subject
        if not self.is_shared:
            # Such a signal reads all tokens, including the tokens in the bucket.
            return Models(student, subject, reference)
        parts = [TeacherDistribution(student)]
        parts += [subject] if self.needs_signal else []
        parts += [reference] if self.needs_reference else []
        folded = share_support(parts)
        if folded[0].full is None or folded[0].outside is None:
            return Models(student, subject, reference)
        return Models(
            folded[0].full,
            folded[1] if self.needs_signal else subject,
            folded[-1] if self.needs_reference else reference,
        )

    def read_groups(self, extras: Mapping[str, Tensor]) -> Int[Tensor, " T"] | None:
        """Return the lengths of groups of tokens that are read together; see `SignalCall`."""
        return self.signal.read_groups(extras)

    def can_answer(self, models: Models) -> bool:
        """Return True if the signals that the term needs are there."""
        if self.needs_signal and models.subject.is_empty:
            return False
        return not (self.needs_reference and models.reference.is_empty)

    def find_unknown(self, models: Models) -> Tensor | None:
        """Return True at the tokens that are missing in a model that the term uses, or None."""
        return _find_unknown(models, self.needs_reference) if self.needs_signal else None

    def compute_divergence(self, models: Models, tokens: Tensor) -> Tensor | None:
        """Return the divergence at each position; None if the signal is no distribution."""
        return self.measure(models, tokens) if self.can_answer(models) else None

    @torch.no_grad()
    def read_target_logprobs(self, models: Models, tokens: Tensor) -> Tensor | None:
        """Return the target's log-probability of each sampled token.

        For `log_linear` a constant that depends on the state is left out.
        """
        return self.read_target(models, tokens) if self.needs_signal else None

    def compute_token_value(self, logprobs: Tensor) -> Tensor:
        """Return the value of one token: its log-probability, negated for a label."""
        return -logprobs if self.is_label else logprobs

    @torch.no_grad()
    def rank(self, student: Tensor, teacher: Tensor | None, batch: TokenBatch) -> dict[str, Tensor]:
        """Return the ranks that the weights need, by name; see `TokenStatistics`."""
        ranks: dict[str, Tensor] = {}
        if teacher is None:
            return ranks
        for name in self.ranks:
            if name == "drafted_rank":
                ranks[name] = count_rejected(student, teacher, batch.draws[:, -1])
                continue
            proposed = batch.tokens if name == "sampled_rank" else student.argmax(dim=-1)
            ranks[name] = (teacher > F.gather_logprobs(teacher, proposed)[:, None]).sum(dim=-1)
        return ranks

    @torch.no_grad()
    def read_reference_logprobs(self, models: Models, tokens: Tensor) -> Tensor | None:
        """Return the reference's log-probability of each token, or None if no weight reads it."""
        if not self.weighs_by_reference or models.reference.is_empty:
            return None
        logprobs = _gather_token_logprobs(models.reference, tokens)
        return forget_unknown(logprobs, self.find_unknown(models))

    @torch.no_grad()
    def compute_state_values(
        self, teacher: TeacherDistribution, teacher_logprobs: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the teacher's raw logits of the sampled tokens and the values of the states.

        Both are None if the term has no returns of raw logits, or no signal. Raises TeacherError if
        the teacher only gave log-probabilities.
        """
        if not self.signal.step or teacher_logprobs is None:
            return None, None
        if teacher.full is None or teacher.level is None:
            model = "reference" if self.asks_reference else "teacher"
            raise TeacherError(
                f"signal {self.signal.name!r} reads the {model}'s raw logits, and it gave "
                "log-probabilities only; set signal: sampled with estimator: "
                "score_function(gamma=1)"
            )
        return teacher_logprobs + teacher.level, self.signal.compute_state_values(teacher)


def compile_logit_side(term: Term) -> LogitSide:
    """Return the logit side of a term."""
    is_plain = term.signal.whole and term.targets_teacher and term.against == "teacher"
    return LogitSide(
        asks_reference=term.against == "reference",
        needs_signal=term.needs_signal,
        needs_reference=term.needs_reference,
        is_shared=not term.signal.unshared,
        measures_teacher=is_plain and term.divergence.name == "reverse_kl",
        is_alone=term.signal.alone,
        is_label=term.signal.label,
        ranks=term.weighs_by & RANK_STATISTICS,
        weighs_by_reference=term.weighs_by_reference,
        signal=term.signal,
        compute_loss=_compile_loss(term),
        measure=_compile_divergence(term),
        read_target=_compile_target(term),
    )


def mark_scored(logprobs: Tensor, unknown: Tensor | None, *, is_scored: bool) -> Tensor:
    """Mark the tokens at which a term has its signal: no token, or all known tokens."""
    scored = torch.full_like(logprobs, is_scored, dtype=torch.bool)
    return scored if unknown is None else scored & ~unknown


def forget_unknown(values: Tensor | None, unknown: Tensor | None) -> Tensor | None:
    """Return numbers about the sampled tokens, NaN at unknown tokens."""
    if values is None or unknown is None:
        return values
    return values.masked_fill(unknown, torch.nan)


def _compile_loss(term: Term) -> LossFunction:
    """Return the function of the number at each token that the token side's coefficient multiplies."""
    if term.signal.alone:
        return lambda models, batch, logprobs, divergence: -F.entropy(models.student)
    if term.signal.label:
        return lambda models, batch, logprobs, divergence: -logprobs
    if term.on_sampled_token:
        return lambda models, batch, logprobs, divergence: logprobs
    if term.signal.drawn:
        return _compile_drawn(term)
    if not term.gradient.pathwise:
        return _compile_sum_over_candidates(term)
    clip = term.clip

    def clip_divergence(
        models: Models, batch: TokenBatch, logprobs: Tensor, divergence: Tensor | None
    ) -> Tensor:
        assert divergence is not None, (
            "the capability check lets no pathwise term through without candidates"
        )
        if not clip.clips_losses:
            return divergence
        return torch.where(clip.find_clipped(divergence), divergence.detach(), divergence)

    return clip_divergence


def _compile_drawn(term: Term) -> LossFunction:
    """Return the signal's loss of tokens that are drawn from the student."""
    signal, compute_advantage = term.signal, term.compute_advantage

    def compute(
        models: Models, batch: TokenBatch, logprobs: Tensor, divergence: Tensor | None
    ) -> Tensor:
        student, teacher = models.student, models.subject.full
        assert teacher is not None, "drawn tokens are scored from the whole distribution"
        with torch.no_grad():
            cumulative = student.double().exp().cumsum(dim=-1)
            # The last entry of a rounded sum is not exactly 1, so the draws are scaled to it.
            draws = batch.draws[:, : signal.drawn].to(cumulative) * cumulative[:, -1:]
            ids = torch.searchsorted(cumulative, draws, right=True)
            ids = ids.clamp_max(student.shape[-1] - 1)
        sample = DrawnTokens(student, teacher, batch.tokens, ids, compute_advantage)
        return signal.compute_drawn_loss(sample)

    return compute


def _compile_sum_over_candidates(term: Term) -> LossFunction:
    """Return the score function summed over the candidates (2604.13016).

    Each candidate is weighted by its renormalised student probability.
    """
    signal, bound, compute_advantage = term.signal, term.clip.bound, term.compute_advantage

    def compute(
        models: Models, batch: TokenBatch, logprobs: Tensor, divergence: Tensor | None
    ) -> Tensor:
        _, valid, student, teacher = _restrict(
            signal, models.student, models.subject, ("drop", "drop")
        )
        share = torch.softmax(student.detach(), dim=-1)
        advantage = bound(compute_advantage(student.detach(), teacher))
        # An impossible candidate has log-probability -inf, and -inf times 0 would be NaN.
        inside = valid & torch.isfinite(student)
        weighted = share * advantage * student.masked_fill(~inside, 0.0)
        return -torch.where(inside, weighted, 0.0).sum(dim=-1)

    return compute


def _compile_divergence(term: Term) -> DivergenceFunction:
    """Return the function of the divergence, differentiable if it is the loss."""
    signal, pathwise, target = term.signal, term.gradient.pathwise, term.target
    if not signal.measures:
        return lambda models, tokens: None
    entry = DIVERGENCES[term.divergence.name]

    def add_up(student: Tensor, teacher: Tensor) -> Tensor:
        """Return two candidate sets' divergence; contributions above the clip are constant."""
        parts = entry.contributions(student, teacher, term.parameter)
        return term.clip.clip_entries(parts).sum(dim=-1)

    def compare_full(models: Models) -> Tensor:
        with torch.no_grad():
            compared, size = build_target(target, models)
        student = models.student
        if models.subject.outside is not None:
            student, compared = floor_buckets([student, compared])
        divergence = add_up(student, compared)
        return divergence if size is None else divergence / size

    def compare_candidates_of(models: Models, tokens: Tensor) -> Tensor:
        student = models.student
        ids, valid, *parts = _restrict(signal, student, models.subject, signal.tails)
        divergence = add_up(*parts)
        if compute_tail is None:
            return divergence
        return divergence + compute_tail(models, tokens, ids, valid)

    compute_tail = _compile_tail(term) if "sampled" in signal.tails else None

    def measure(models: Models, tokens: Tensor) -> Tensor:
        if not pathwise:
            # Under other estimators the divergence is only measured, so it needs no graph.
            models = replace(models, student=models.student.detach())
        if signal.compares:
            return signal.compare(term.build_comparison(models.student, models.subject, tokens))
        if signal.whole and models.subject.full is not None:
            return compare_full(models)
        return compare_candidates_of(models, tokens)

    return measure


def _compile_tail(term: Term) -> Callable[[Models, Tensor, Tensor, Tensor], Tensor]:
    """Return a function with value 0 and the expected gradient of the tail's divergence.

    The sampled token carries it, unless the candidates already account for that token.
    """
    entry, parameter, read_target = (
        DIVERGENCES[term.divergence.name],
        term.parameter,
        _compile_target(term),
    )
    needs_reference = term.needs_reference

    def compute(models: Models, tokens: Tensor, ids: Tensor, valid: Tensor) -> Tensor:
        is_known = ((ids == tokens[:, None]) & valid).any(dim=-1)
        unknown = _find_unknown(models, needs_reference)
        if unknown is not None:
            # Such a token is in no tail; it is replaced by token 0, so that all numbers are finite.
            is_known, tokens = is_known | unknown, tokens.masked_fill(unknown, 0)
        with torch.no_grad():
            teacher_logprobs = read_target(models, tokens)
        assert teacher_logprobs is not None
        logprobs = F.gather_logprobs(models.student, tokens)
        coefficient = entry.tail_coefficient(logprobs.detach(), teacher_logprobs, parameter)
        coefficient = torch.where(is_known, torch.zeros_like(coefficient), coefficient)
        return coefficient * (logprobs - logprobs.detach())

    return compute


def _compile_target(term: Term) -> TargetFunction:
    """Return the function of the target's log-probability of each sampled token."""
    target, is_product = term.target, term.target.is_product
    # At a sampled token a product needs no normaliser, and the whole distribution is not built.
    by_token = is_product and term.signal.sampled

    def read(models: Models, tokens: Tensor) -> Tensor | None:
        if models.subject.full is not None and not by_token:
            return F.gather_logprobs(build_target(target, models)[0], tokens)
        teacher = _gather_token_logprobs(models.subject, tokens)
        if teacher is None or not is_product or target.is_plain:
            return teacher
        student = F.gather_logprobs(models.student, tokens)
        return target.combine(teacher, student, _gather_token_logprobs(models.reference, tokens))

    return read


def build_target(target: TargetCall, models: Models) -> tuple[Tensor, Tensor | None]:
    """Return the target's log-probabilities, and the divisor of the divergence or None."""
    teacher = models.subject.full
    assert teacher is not None, "a target is made of whole distributions"
    return target.build(teacher, models.student, models.reference.full)


def _find_unknown(models: Models, needs_reference: bool) -> Tensor | None:
    """Return True at the tokens that are missing in a model that a term uses, or None."""
    both = [models.subject, *([models.reference] if needs_reference else [])]
    marks = [model.unknown for model in both if model.unknown is not None]
    return torch.stack(marks).any(dim=0) if marks else None


@torch.no_grad()
def _compute_reverse_kl(
    sides: Sequence[LogitSide],
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
    for side, divergence in zip(sides, divergences, strict=True):
        if side.measures_teacher and divergence is not None:
            return divergence.detach()
    return F.reverse_kl(*share_pair(student, teacher))


def _gather_token_logprobs(teacher: TeacherDistribution, tokens: Tensor) -> Tensor | None:
    if teacher.full is None:
        return teacher.logprobs
    logprobs = F.gather_logprobs(teacher.full, tokens)
    # Finite at tokens that the teacher does not have: their coefficient is 0, and so is 0 times it.
    return logprobs if teacher.unknown is None else logprobs.masked_fill(teacher.unknown, 0.0)


@torch.no_grad()
def read_target(
    term: Term,
    student: Float[Tensor, "T V"],
    teacher: Float[Tensor, "T V"],
    reference: Float[Tensor, "T V"] | None,
) -> tuple[Float[Tensor, "T V"], Float[Tensor, " T"] | None]:
    """Return the target of a term about the teacher, and the reverse KL if it is over candidates
    only.

    The teacher replaces a target that is one token, because a label has no reverse KL, and a target
    with a missing reference.
    """
    teacher_alone = TeacherDistribution(teacher)
    restricted = compare_candidates(term.signal, student, teacher_alone)
    if restricted is not None:
        return teacher, restricted
    if term.target.is_label or (term.needs_reference and reference is None):
        return teacher, None
    reference_alone = TeacherDistribution(reference)
    subject = teacher_alone if term.against == "teacher" else reference_alone
    models = Models(student, subject, reference_alone)
    return build_target(term.target, models)[0], None


def measures_teacher(term: Term) -> bool:
    """Return True if a term is measured against the teacher: its target is the teacher or a label."""
    return term.targets_teacher or term.target.is_label


def cuts_to_candidates(signal: SignalCall) -> bool:
    """Return True if the loss compares distributions over the candidates of a signal."""
    return isinstance(signal, TopK) and signal.tail in ("bucket", "renorm")


@torch.no_grad()
def compare_candidates(
    signal: SignalCall, student: Float[Tensor, "T V"], teacher: TeacherDistribution
) -> Float[Tensor, " T"] | None:
    """Return the reverse KL over the candidates that a signal chooses, restricted as in the loss.

    None if the signal chooses no candidates, or if the restriction is not a distribution.
    """
    if not cuts_to_candidates(signal):
        return None
    return F.reverse_kl(*_restrict(signal, student, teacher, signal.tails)[2:])


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
    """Restrict folded distributions: candidates are tokens that both models have."""
    with torch.no_grad():
        inside = student[:, :-1], teacher[:, :-1]
        ids, valid = F.candidates(*inside, signal.candidates, signal.chooser)
        # If there are more candidates than common tokens, some candidates are not common.
        valid = valid & ~torch.isin(ids, outside)
    pair = [
        F.restrict(part, ids, valid, tail, len(outside))
        for part, tail in zip((student, teacher), tails, strict=True)
    ]
    if tails == ("bucket", "bucket"):
        pair = floor_buckets(pair)
    return ids, valid, pair[0], pair[1]
