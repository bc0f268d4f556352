"""The two sides of an objective.

The *logit side* needs the vocabulary axis: for one chunk of tokens it turns the log-probabilities of student and teacher
into one differentiable number a token and the statistics that monitors want. The *token side* needs only [T]: it turns
those statistics into one detached coefficient a token. The loss is the sum of their products, so chunks and
micro-batches can be added up in any order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum import functional as F
from practicum.functional.divergences import DIVERGENCES
from practicum.functional.estimators import CORRECTIONS
from practicum.functional.sequence import token_coefficients
from practicum.functional.weights import WEIGHTS, TokenStatistics
from practicum.objective.spec import (
    Full,
    LogLinear,
    Mixture,
    Objective,
    Pathwise,
    Sampled,
    ScoreFunction,
    TeacherTarget,
    Term,
    TopK,
)
from practicum.types import Datum


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Every supervised token of some rollouts, end to end; sequences that follow one another are told apart by `rows`."""

    tokens: Int[Tensor, " T"]
    rows: Int[Tensor, " T"]
    positions: Int[Tensor, " T"]
    sampling_logprobs: Float[Tensor, " T"]
    policy_logprobs: Float[Tensor, " T"]
    aggregate: Float[Tensor, " T"]
    rewards: tuple[float | None, ...]
    groups: tuple[str, ...]

    def __getitem__(self, part: slice | Int[Tensor, " t"]) -> "TokenBatch":
        """The same batch at some of its tokens."""
        tensors = {
            field.name: value[part] for field in fields(self) if isinstance(value := getattr(self, field.name), Tensor)
        }
        return TokenBatch(**tensors, rewards=self.rewards, groups=self.groups)


@dataclass(frozen=True, slots=True)
class TeacherTokens:
    """What the teacher said about T tokens: its whole distribution, or its candidates, or the sampled token alone."""

    full: Float[Tensor, "T V"] | None = None
    topk_ids: Int[Tensor, "T K"] | None = None
    topk_logprobs: Float[Tensor, "T K"] | None = None
    logprobs: Float[Tensor, " T"] | None = None

    def to(self, device: torch.device) -> "TeacherTokens":
        """The same on another device."""
        return TeacherTokens(*_each(self, lambda tensor: tensor.to(device)))


@dataclass(frozen=True, slots=True)
class TermValues:
    """The logit side of one term: the differentiable `value` a token, and what the token side needs, detached.

    `reverse_kl` is measured whatever the term's own divergence: the common yardstick of all objectives.
    """

    value: Float[Tensor, " T"]
    logprobs: Float[Tensor, " T"]
    teacher_logprobs: Float[Tensor, " T"] | None
    divergence: Float[Tensor, " T"] | None
    student_entropy: Float[Tensor, " T"]
    teacher_entropy: Float[Tensor, " T"] | None
    reverse_kl: Float[Tensor, " T"] | None

    def __getitem__(self, index: Int[Tensor, " t"]) -> "TermValues":
        """The same at some of its tokens."""
        return TermValues(*_each(self, lambda tensor: tensor[index]))

    def detached(self) -> "TermValues":
        """The same on the CPU and without a graph, for the token side."""
        return TermValues(*_each(self, lambda tensor: tensor.detach().cpu()))

    @staticmethod
    def concatenate(parts: "Sequence[TermValues]") -> "TermValues":
        """Chunks put end to end; a statistic that one of them lacks is nobody's."""
        columns = zip(*(_tensors(part) for part in parts), strict=True)
        return TermValues(*(_joined(column) for column in columns))


def _tensors(values: "TeacherTokens | TermValues") -> list[Any]:
    return [getattr(values, field.name) for field in fields(values)]


def _each(values: "TeacherTokens | TermValues", function: Callable[[Tensor], Tensor]) -> list[Any]:
    return [None if tensor is None else function(tensor) for tensor in _tensors(values)]


def _joined(column: Sequence[Any]) -> Any:
    return None if any(tensor is None for tensor in column) else torch.cat(tuple(column))


def token_batch(data: Sequence[Datum], objective: Objective) -> TokenBatch:
    """The supervised tokens of all rollouts, each with the coefficient that the aggregate gives its sequence."""
    masks = [datum.rollout.loss_mask for datum in data]
    lengths = [int(mask.sum()) for mask in masks]
    coefficients = token_coefficients(lengths, objective.aggregate, objective.aggregate_norm)
    counts = torch.tensor(lengths, dtype=torch.long)
    return TokenBatch(
        tokens=torch.cat([datum.rollout.tokens[mask] for datum, mask in zip(data, masks, strict=True)]),
        rows=torch.repeat_interleave(torch.arange(len(data)), counts),
        positions=torch.cat([mask.nonzero()[:, 0] for mask in masks]),
        sampling_logprobs=torch.cat(
            [datum.rollout.sampling_logprobs[mask] for datum, mask in zip(data, masks, strict=True)]
        ),
        policy_logprobs=torch.cat(
            [datum.rollout.policy_logprobs[mask] for datum, mask in zip(data, masks, strict=True)]
        ),
        aggregate=torch.repeat_interleave(torch.tensor(coefficients, dtype=torch.float32), counts),
        rewards=tuple(datum.rollout.reward for datum in data),
        groups=tuple(datum.rollout.prompt.id for datum in data),
    )


def logit_side(
    student: Float[Tensor, "T V"], teacher: TeacherTokens, tokens: Int[Tensor, " T"], objective: Objective
) -> list[TermValues]:
    """One `TermValues` a term, from the log-probabilities of the same T positions."""
    logprobs = F.gather_logprobs(student, tokens)
    with torch.no_grad():
        student_entropy = F.entropy(student)
        teacher_entropy = None if teacher.full is None else F.entropy(teacher.full)
    divergences = [_divergence(term, student, teacher, tokens) for term in objective.losses]
    reverse_kl = _yardstick(objective, student, teacher, logprobs, divergences)
    values = []
    for term, divergence in zip(objective.losses, divergences, strict=True):
        value = divergence if isinstance(term.gradient, Pathwise) else logprobs
        assert value is not None, "the capability check lets no pathwise term through without candidates"
        values.append(
            TermValues(
                value=value,
                logprobs=logprobs.detach(),
                teacher_logprobs=_teacher_logprobs(term, student, teacher, tokens),
                divergence=None if divergence is None else divergence.detach(),
                student_entropy=student_entropy,
                teacher_entropy=teacher_entropy,
                reverse_kl=reverse_kl,
            )
        )
    return values


@torch.no_grad()
def _yardstick(
    objective: Objective,
    student: Tensor,
    teacher: TeacherTokens,
    logprobs: Tensor,
    divergences: Sequence[Tensor | None],
) -> Tensor | None:
    """Reverse KL to the teacher itself: exact where its distribution is known, else by the sampled token (k1)."""
    if teacher.full is None:
        return None if teacher.logprobs is None else F.k1(logprobs, teacher.logprobs)
    for term, divergence in zip(objective.losses, divergences, strict=True):
        plain = isinstance(term.signal, Full) and term.target == TeacherTarget()
        if plain and term.divergence.name == "reverse_kl" and divergence is not None:
            return divergence.detach()
    return F.reverse_kl(student, teacher.full)


@torch.no_grad()
def token_side(term: Term, values: TermValues, batch: TokenBatch) -> Float[Tensor, " T"]:
    """The detached coefficient of each token's value in the loss.

    For a pathwise term that is weight times aggregate; for a score function it is also times minus the return.
    Terms with `needs_sequences` must be given whole sequences.
    """
    coefficient = term.coefficient * batch.aggregate * _weights(term, values, batch) * _filter(term, batch)
    log_ratio = values.logprobs - batch.sampling_logprobs
    if isinstance(term.gradient, Pathwise):
        return coefficient * _state_factor(term, log_ratio, batch)
    returns = _returns(term, values, batch, log_ratio)
    if term.correction.name == "prefix_ratio":
        return -coefficient * returns
    return -coefficient * _token_factor(term, log_ratio, returns) * returns


def _target(term: Term, student: Tensor, teacher: Tensor) -> Tensor:
    target = term.target
    if isinstance(target, LogLinear):
        return F.log_linear([(target.teacher, teacher), (target.student, student.detach())])
    if isinstance(target, Mixture):
        return F.mixture([(target.teacher, teacher), (1.0 - target.teacher, student.detach())])
    return teacher if target.temperature == 1.0 else F.temper(teacher, target.temperature)


def _teacher_logprobs(term: Term, student: Tensor, teacher: TeacherTokens, tokens: Tensor) -> Tensor | None:
    """The target's log-probability of the sampled token, up to a constant of the state for `log_linear`."""
    if teacher.full is not None:
        with torch.no_grad():
            return F.gather_logprobs(_target(term, student, teacher.full), tokens)
    if teacher.logprobs is None or not isinstance(term.target, LogLinear):
        return teacher.logprobs
    logprobs = F.gather_logprobs(student, tokens).detach()
    return term.target.teacher * teacher.logprobs + term.target.student * logprobs


def _divergence(term: Term, student: Tensor, teacher: TeacherTokens, tokens: Tensor) -> Tensor | None:
    """The divergence at each position, differentiable where it is the loss; None where the signal is one token only."""
    student = student if isinstance(term.gradient, Pathwise) else student.detach()
    divergence = DIVERGENCES[term.divergence.name]
    if isinstance(term.signal, Full) and teacher.full is not None:
        return divergence.value(student, _target(term, student, teacher.full), term.parameter)
    if isinstance(term.signal, Sampled):
        return None
    assert isinstance(term.signal, TopK)
    ids, valid, student_part, teacher_part = _candidates(term.signal, student, teacher)
    value = divergence.value(student_part, teacher_part, term.parameter)
    if term.signal.tail != "sampled":
        return value
    return value + _sampled_tail(term, student, teacher, tokens, (ids == tokens[:, None]) & valid)


def _candidates(signal: TopK, student: Tensor, teacher: TeacherTokens) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if teacher.full is not None:
        with torch.no_grad():
            ids, valid = F.candidates(student, teacher.full, signal.k, signal.support)
        return (
            ids,
            valid,
            F.restrict(student, ids, valid, signal.tail),
            F.restrict(teacher.full, ids, valid, signal.tail),
        )
    assert teacher.topk_ids is not None and teacher.topk_logprobs is not None
    ids, logprobs = teacher.topk_ids, teacher.topk_logprobs
    valid = torch.isfinite(logprobs)
    return ids, valid, F.restrict(student, ids, valid, signal.tail), F.restrict_candidates(logprobs, valid, signal.tail)


def _sampled_tail(term: Term, student: Tensor, teacher: TeacherTokens, tokens: Tensor, is_candidate: Tensor) -> Tensor:
    """A zero whose gradient is that of the tail's divergence in expectation, carried by the sampled token."""
    teacher_logprobs = _teacher_logprobs(term, student, teacher, tokens)
    assert teacher_logprobs is not None
    logprobs = F.gather_logprobs(student, tokens)
    divergence = DIVERGENCES[term.divergence.name]
    coefficient = divergence.tail_coefficient(logprobs.detach(), teacher_logprobs, term.parameter)
    coefficient = torch.where(is_candidate.any(dim=-1), torch.zeros_like(coefficient), coefficient)
    return coefficient * (logprobs - logprobs.detach())


def _advantage(term: Term, values: TermValues, batch: TokenBatch) -> Tensor:
    assert values.teacher_logprobs is not None
    learner = values.logprobs if term.advantage_logprob == "learner" else batch.sampling_logprobs
    return DIVERGENCES[term.divergence.name].advantage(learner, values.teacher_logprobs, term.parameter)


def _returns(term: Term, values: TermValues, batch: TokenBatch, log_ratio: Tensor) -> Tensor:
    """The return of each token; with `prefix_ratio` every advantage is weighted by the ratios that lead up to it."""
    gradient = term.gradient if isinstance(term.gradient, ScoreFunction) else ScoreFunction()
    advantage = _advantage(term, values, batch)
    if gradient.baseline == "kl":
        assert values.divergence is not None, "the capability check asks for candidates"
        advantage = advantage + values.divergence
    if term.correction.name == "prefix_ratio":
        advantage = advantage * _prefix_ratio(log_ratio, batch)
    returns = advantage
    if gradient.gamma > 0:
        returns = _by_row(batch, advantage, lambda row: F.reward_to_go(row, gradient.gamma))
    return returns - _others_mean(returns, batch) if gradient.baseline == "group_mean" else returns


def _others_mean(returns: Tensor, batch: TokenBatch) -> Tensor:
    """For each token the mean return of the *other* completions of its prompt (0 where there are none)."""
    count = len(batch.groups)
    sums = returns.new_zeros(count).index_add_(0, batch.rows, returns)
    sizes = returns.new_zeros(count).index_add_(0, batch.rows, torch.ones_like(returns))
    names = {name: index for index, name in enumerate(dict.fromkeys(batch.groups))}
    group = torch.tensor([names[name] for name in batch.groups])
    other_sums = returns.new_zeros(len(names)).index_add_(0, group, sums)[group] - sums
    other_sizes = returns.new_zeros(len(names)).index_add_(0, group, sizes)[group] - sizes
    return (other_sums / other_sizes.clamp_min(1.0))[batch.rows]


def _by_row(batch: TokenBatch, values: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    lengths = torch.bincount(batch.rows, minlength=len(batch.groups)).tolist()
    return torch.cat([function(row) for row in values.split(lengths)])


def _token_factor(term: Term, log_ratio: Tensor, advantage: Tensor) -> Tensor:
    """The correction of each token by itself."""
    return CORRECTIONS[term.correction.name].function(log_ratio, advantage, **term.correction.arguments)


def _state_factor(term: Term, log_ratio: Tensor, batch: TokenBatch) -> Tensor:
    """The correction of a divergence at a state; how the state was reached does not depend on the token after it."""
    if term.correction.name == "prefix_ratio":
        return _prefix_ratio(log_ratio, batch) / log_ratio.exp()
    return _token_factor(term, log_ratio, -torch.ones_like(log_ratio))


def _prefix_ratio(log_ratio: Tensor, batch: TokenBatch) -> Tensor:
    """The product of the ratios of each sequence up to and including each token."""
    return _by_row(batch, log_ratio, lambda row: CORRECTIONS["prefix_ratio"].function(row, torch.ones_like(row)))


def _weights(term: Term, values: TermValues, batch: TokenBatch) -> Tensor:
    statistics = TokenStatistics(
        loss_mask=torch.ones_like(batch.aggregate),
        student_entropy=values.student_entropy,
        teacher_entropy=values.teacher_entropy,
        divergence=values.reverse_kl if values.divergence is None else values.divergence,
        logprobs=values.logprobs,
        teacher_logprobs=values.teacher_logprobs,
        positions=batch.positions,
    )
    return WEIGHTS[term.weights.name].function(statistics, **term.weights.arguments)


def _filter(term: Term, batch: TokenBatch) -> Tensor:
    """1 for the tokens of the rollouts the term is about, 0 for the others."""
    if term.filter == "all":
        return torch.ones_like(batch.aggregate)
    wanted = term.filter == "correct"
    keep = [reward is not None and (reward >= 1.0) == wanted for reward in batch.rewards]
    return torch.tensor(keep, dtype=torch.float32)[batch.rows]
