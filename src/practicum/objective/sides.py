"""The two sides of an objective.

The *logit side* needs the vocabulary axis: for one chunk of tokens it turns the log-probabilities of student and teacher
into one differentiable number a token and the statistics that monitors want. The *token side* needs only [T]: it turns
those statistics into one detached coefficient a token. The loss is the sum of their products, so chunks and
micro-batches can be added up in any order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from practicum import functional as F
from practicum.functional.advantages import ADVANTAGES, modulate
from practicum.functional.divergences import DIVERGENCES
from practicum.functional.estimators import CORRECTIONS
from practicum.functional.samples import SAMPLE_WEIGHTS, SampleStatistics
from practicum.functional.sequence import token_coefficients
from practicum.functional.weights import WEIGHTS, TokenStatistics
from practicum.objective.choices import (
    AddAdvantage,
    ClipAdvantage,
    ClipEntries,
    ClipLoss,
    Contrast,
    Draws,
    Full,
    LogLinear,
    Mixture,
    Modulate,
    Pathwise,
    Sampled,
    Score,
    ScoreFunction,
    TeacherTarget,
    Text,
    TopK,
)
from practicum.objective.spec import Objective, Term
from practicum.randomness import seed_of
from practicum.types import Datum, Rollout, Source


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Every supervised token of some rollouts, end to end; sequences that follow one another are told apart by `rows`.

    `draws` are the random numbers of `mc` signals. The tuples are by row: rewards, prompts, texts, sources, and in `first` the
    first row with the same rollout, which is another one where several teachers each have a row for it.
    """

    tokens: Int[Tensor, " T"]
    rows: Int[Tensor, " T"]
    positions: Int[Tensor, " T"]
    sampling_logprobs: Float[Tensor, " T"]
    policy_logprobs: Float[Tensor, " T"]
    aggregate: Float[Tensor, " T"]
    draws: Float[Tensor, "T K"]
    rewards: tuple[float | None, ...]
    groups: tuple[str, ...]
    texts: tuple[str, ...]
    sources: tuple[Source, ...]
    first: tuple[int, ...]

    def __getitem__(self, part: slice | Int[Tensor, " t"]) -> "TokenBatch":
        """The same batch at some of its tokens."""
        tensors = {
            field.name: value[part] for field in fields(self) if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **tensors)

    def to(self, device: torch.device) -> "TokenBatch":
        """The tokens and the random numbers on another device; what the token side reads stays where it is."""
        return replace(self, tokens=self.tokens.to(device), draws=self.draws.to(device))

    def by_group(self) -> "list[list[int]]":
        """The rows of each prompt, each rollout once."""
        rows: dict[str, list[int]] = {}
        for row, group in enumerate(self.groups):
            if self.first[row] == row:
                rows.setdefault(group, []).append(row)
        return list(rows.values())


@dataclass(frozen=True, slots=True)
class TeacherTokens:
    """What a teacher said about T tokens: its whole distribution, its candidates, the sampled token alone, or nothing."""

    full: Float[Tensor, "T V"] | None = None
    topk_ids: Int[Tensor, "T K"] | None = None
    topk_logprobs: Float[Tensor, "T K"] | None = None
    logprobs: Float[Tensor, " T"] | None = None

    @property
    def silent(self) -> bool:
        """Whether the teacher said nothing about these tokens."""
        return all(tensor is None for tensor in _tensors(self))

    def to(self, device: torch.device) -> "TeacherTokens":
        """The same on another device."""
        return TeacherTokens(*_each(self, lambda tensor: tensor.to(device)))


@dataclass(frozen=True, slots=True)
class TermValues:
    """The logit side of one term: the differentiable `value` a token, and what the token side needs, detached.

    `answered` is where the term has what it asks for. `reverse_kl` to the teacher is measured whatever the term's own
    divergence: the common yardstick of all objectives.
    """

    value: Float[Tensor, " T"]
    answered: Bool[Tensor, " T"]
    logprobs: Float[Tensor, " T"]
    teacher_logprobs: Float[Tensor, " T"] | None
    divergence: Float[Tensor, " T"] | None
    student_entropy: Float[Tensor, " T"]
    teacher_entropy: Float[Tensor, " T"] | None
    reverse_kl: Float[Tensor, " T"] | None
    teacher_rank: Int[Tensor, " T"] | None = None

    def __getitem__(self, index: Int[Tensor, " t"]) -> "TermValues":
        """The same at some of its tokens."""
        return TermValues(*_each(self, lambda tensor: tensor[index]))

    def detached(self) -> "TermValues":
        """The same on the CPU and without a graph, for the token side."""
        return TermValues(*_each(self, lambda tensor: tensor.detach().cpu()))

    @staticmethod
    def concatenate(parts: "Sequence[TermValues]") -> "TermValues":
        """Chunks put end to end; a statistic that one of them lacks is NaN there."""
        lengths = [len(part.value) for part in parts]
        columns = zip(*(_tensors(part) for part in parts), strict=True)
        return TermValues(*(_joined(column, lengths) for column in columns))


def _tensors(values: "TeacherTokens | TermValues") -> list[Any]:
    return [getattr(values, field.name) for field in fields(values)]


def _each(values: "TeacherTokens | TermValues", function: Callable[[Tensor], Tensor]) -> list[Any]:
    return [None if tensor is None else function(tensor) for tensor in _tensors(values)]


def _joined(column: Sequence[Any], lengths: Sequence[int]) -> Any:
    if all(tensor is None for tensor in column):
        return None
    return torch.cat(
        [
            torch.full((length,), torch.nan) if tensor is None else tensor
            for tensor, length in zip(column, lengths, strict=True)
        ]
    )


def token_batch(data: Sequence[Datum], objective: Objective, seed: int = 0) -> TokenBatch:
    """The supervised tokens of all rollouts, each with the coefficient that the aggregate gives its sequence.

    A rollout that several data share, one a teacher, is one sequence of the aggregate.
    """
    masks = [datum.rollout.loss_mask for datum in data]
    lengths = [int(mask.sum()) for mask in masks]
    counts = torch.tensor(lengths, dtype=torch.long)
    draws = max((term.signal.k for term in objective.losses if isinstance(term.signal, Draws)), default=0)
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
        aggregate=torch.repeat_interleave(torch.tensor(_coefficients(data, lengths, objective)), counts),
        draws=torch.cat([_draws(datum.rollout, draws, seed) for datum in data]),
        rewards=tuple(datum.rollout.reward for datum in data),
        groups=tuple(datum.rollout.prompt.id for datum in data),
        texts=tuple(datum.rollout.text for datum in data),
        sources=tuple(datum.rollout.source for datum in data),
        first=_first_rows(data),
    )


def _first_rows(data: Sequence[Datum]) -> tuple[int, ...]:
    """For each datum the first one with the very same rollout."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(datum.rollout), row) for row, datum in enumerate(data))


def _coefficients(data: Sequence[Datum], lengths: Sequence[int], objective: Objective) -> list[float]:
    """The coefficient of each token of each datum."""
    first = _first_rows(data)
    once = {row: lengths[row] for row in first}
    shares = token_coefficients(list(once.values()), objective.aggregate, objective.aggregate_norm)
    share_of = dict(zip(once, shares, strict=True))
    return [share_of[row] * datum.weight for row, datum in zip(first, data, strict=True)]


def _draws(rollout: Rollout, k: int, seed: int) -> Float[Tensor, "T K"]:
    """The rollout's own random numbers, at its supervised tokens."""
    generator = torch.Generator().manual_seed(seed_of(seed, "mc", rollout.prompt.id, rollout.sample))
    return torch.rand(len(rollout.tokens), k, generator=generator)[rollout.loss_mask]


def logit_side(
    student: Float[Tensor, "T V"],
    teacher: TeacherTokens,
    batch: TokenBatch,
    objective: Objective,
    reference: TeacherTokens | None = None,
) -> list[TermValues]:
    """One `TermValues` a term, from the log-probabilities of the same T positions."""
    said = _Said(teacher, reference or TeacherTokens())
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
                value=_value(term, student, said, batch, logprobs, divergence) if known else logprobs,
                answered=torch.full_like(logprobs, known, dtype=torch.bool),
                logprobs=logprobs.detach(),
                teacher_logprobs=_teacher_logprobs(term, student, said, batch.tokens) if known else None,
                divergence=None if divergence is None else divergence.detach(),
                student_entropy=student_entropy,
                teacher_entropy=None if of.full is None else F.entropy(of.full),
                reverse_kl=reverse_kl,
                teacher_rank=teacher_rank(term, of.full, batch.tokens),
            )
        )
    return values


@dataclass(frozen=True, slots=True)
class _Said:
    """What teacher and reference said about the same tokens."""

    teacher: TeacherTokens
    reference: TeacherTokens

    def of(self, term: Term) -> TeacherTokens:
        """The one that the term is about."""
        return self.teacher if term.against == "teacher" else self.reference

    def answer(self, term: Term) -> bool:
        """Whether the term has what it asks for."""
        if term.asks and self.of(term).silent:
            return False
        return not (term.asks_reference and self.reference.silent)


def _value(
    term: Term, student: Tensor, said: _Said, batch: TokenBatch, logprobs: Tensor, divergence: Tensor | None
) -> Tensor:
    """The number at each token whose gradient, times the token side's coefficient, is the loss's."""
    if isinstance(term.signal, Text):
        return -logprobs
    if term.on_sampled_token:
        return logprobs
    if isinstance(term.signal, Draws):
        return _drawn(term, term.signal.k, student, said.of(term), batch)
    if not isinstance(term.gradient, Pathwise):
        return _over_candidates(term, student, said.of(term))
    assert divergence is not None, "the capability check lets no pathwise term through without candidates"
    return _clipped_loss(term, divergence)


def _clipped_loss(term: Term, value: Tensor) -> Tensor:
    if not isinstance(term.clip, ClipLoss):
        return value
    return torch.where(value > term.clip.maximum, value.detach(), value)


def _drawn(term: Term, k: int, student: Tensor, teacher: TeacherTokens, batch: TokenBatch) -> Tensor:
    """The score function over k tokens drawn from the student at each state (AsyncOPD, arXiv 2606.24143)."""
    assert teacher.full is not None, "drawn tokens are scored from the whole distribution"
    with torch.no_grad():
        cumulative = student.double().exp().cumsum(dim=-1)
        ids = torch.searchsorted(cumulative, batch.draws[:, :k].to(cumulative) * cumulative[:, -1:], right=True)
        ids = ids.clamp_max(student.shape[-1] - 1)
    drawn = student.gather(-1, ids)
    advantage = DIVERGENCES[term.divergence.name].advantage(
        drawn.detach(), teacher.full.gather(-1, ids), term.parameter
    )
    return -(advantage * drawn).mean(dim=-1)


def _over_candidates(term: Term, student: Tensor, teacher: TeacherTokens) -> Tensor:
    """The score function over the candidates, each weighted by its renormalised student probability (2604.13016)."""
    assert isinstance(term.signal, TopK)
    _, valid, student_part, teacher_part = _candidates(
        term.signal.model_copy(update={"tail": "drop"}), student, teacher
    )
    share = torch.softmax(student_part.detach(), dim=-1)
    advantage = DIVERGENCES[term.divergence.name].advantage(student_part.detach(), teacher_part, term.parameter)
    inside = valid & torch.isfinite(student_part)
    return -torch.where(inside, share * advantage * student_part.masked_fill(~inside, 0.0), 0.0).sum(dim=-1)


@torch.no_grad()
def teacher_rank(term: Term, teacher: Tensor | None, tokens: Tensor) -> Tensor | None:
    """How many tokens the teacher finds likelier than the sampled one, where the weights ask."""
    if teacher is None or term.weights.name not in ("accepted", "rejected"):
        return None
    return (teacher > F.gather_logprobs(teacher, tokens)[:, None]).sum(dim=-1)


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
        plain = isinstance(term.signal, Full) and term.target == TeacherTarget() and term.against == "teacher"
        if plain and term.divergence.name == "reverse_kl" and divergence is not None:
            return divergence.detach()
    return F.reverse_kl(student, teacher.full)


@torch.no_grad()
def token_side(term: Term, values: TermValues, batch: TokenBatch) -> Float[Tensor, " T"]:
    """The detached coefficient of each token's value in the loss, 0 where nobody answered.

    For a differentiated value that is weight times aggregate; for a sampled token it is also times minus the return.
    Terms with `needs_sequences` must be given whole sequences.
    """
    if not values.answered.any():
        return torch.zeros_like(values.logprobs)
    kept = _kept(term, batch)
    coefficient = (
        term.coefficient * batch.aggregate * _weights(term, values, batch) * _by_sample(term, values, batch, kept)
    )
    log_ratio = _log_ratio(term, values, batch)
    if not term.on_sampled_token:
        coefficient = coefficient * _state_factor(term, log_ratio, batch)
    else:
        returns = _returns(term, values, batch, log_ratio)
        factor = 1.0 if term.correction.name == "prefix_ratio" else _token_factor(term, log_ratio, returns)
        coefficient = -coefficient * factor * returns
    return torch.where(values.answered, coefficient, 0.0)


def _target(term: Term, student: Tensor, said: _Said) -> tuple[Tensor, Tensor | None]:
    """The target's log-probabilities, and what the divergence is divided by at each position, if anything."""
    target, teacher = term.target, said.of(term).full
    assert teacher is not None, "a target is made of whole distributions"
    if isinstance(target, LogLinear):
        if target.plain:
            return teacher, None
        parts = [(target.teacher, teacher), (target.student, student.detach()), (target.reference, said.reference.full)]
        return F.log_linear([(share, part) for share, part in parts if part is not None and share != 0.0]), None
    if isinstance(target, Mixture):
        return F.mixture([(target.teacher, teacher), (1.0 - target.teacher, student.detach())]), None
    if isinstance(target, Contrast):
        assert said.reference.full is not None
        return F.contrast(teacher, said.reference.full, target.scale, target.floor)
    if target.temperature == 0.0:
        return F.greedy(teacher), None
    return (teacher if target.temperature == 1.0 else F.temper(teacher, target.temperature)), None


@torch.no_grad()
def _teacher_logprobs(term: Term, student: Tensor, said: _Said, tokens: Tensor) -> Tensor | None:
    """The target's log-probability of the sampled token, up to a constant of the state for `log_linear`."""
    if not term.asks:
        return None
    teacher, target = said.of(term), term.target
    if teacher.full is not None and not (isinstance(target, LogLinear) and isinstance(term.signal, Sampled)):
        return F.gather_logprobs(_target(term, student, said)[0], tokens)
    own = _token_logprobs(teacher, tokens)
    if own is None or not isinstance(target, LogLinear) or target.plain:
        return own
    reference = _token_logprobs(said.reference, tokens)
    parts = [(target.teacher, own), (target.student, F.gather_logprobs(student, tokens)), (target.reference, reference)]
    return torch.stack([share * part for share, part in parts if part is not None and share != 0.0]).sum(dim=0)


def _token_logprobs(teacher: TeacherTokens, tokens: Tensor) -> Tensor | None:
    return teacher.logprobs if teacher.full is None else F.gather_logprobs(teacher.full, tokens)


def _divergence(term: Term, student: Tensor, said: _Said, tokens: Tensor) -> Tensor | None:
    """The divergence at each position, differentiable where it is the loss; None where the signal is no distribution."""
    teacher = said.of(term)
    if isinstance(term.signal, Sampled | Draws | Text | Score) or not said.answer(term):
        return None
    student = student if isinstance(term.gradient, Pathwise) else student.detach()
    if isinstance(term.signal, Full) and teacher.full is not None:
        with torch.no_grad():
            target, size = _target(term, student, said)
        value = _summed(term, student, target)
        return value if size is None else value / size
    assert isinstance(term.signal, TopK)
    ids, valid, student_part, teacher_part = _candidates(term.signal, student, teacher)
    value = _summed(term, student_part, teacher_part)
    if term.signal.tail != "sampled":
        return value
    return value + _sampled_tail(term, student, said, tokens, (ids == tokens[:, None]) & valid)


def _summed(term: Term, student: Tensor, target: Tensor) -> Tensor:
    """The divergence of two sets of candidates, of which those over the clip are held constant."""
    parts = DIVERGENCES[term.divergence.name].contributions(student, target, term.parameter)
    if isinstance(term.clip, ClipEntries):
        parts = torch.where(parts > term.clip.maximum, parts.detach(), parts)
    return parts.sum(dim=-1)


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


def _sampled_tail(term: Term, student: Tensor, said: _Said, tokens: Tensor, is_candidate: Tensor) -> Tensor:
    """A zero whose gradient is that of the tail's divergence in expectation, carried by the sampled token."""
    teacher_logprobs = _teacher_logprobs(term, student, said, tokens)
    assert teacher_logprobs is not None
    logprobs = F.gather_logprobs(student, tokens)
    divergence = DIVERGENCES[term.divergence.name]
    coefficient = divergence.tail_coefficient(logprobs.detach(), teacher_logprobs, term.parameter)
    coefficient = torch.where(is_candidate.any(dim=-1), torch.zeros_like(coefficient), coefficient)
    return coefficient * (logprobs - logprobs.detach())


def _advantage(term: Term, values: TermValues, batch: TokenBatch) -> Tensor:
    if values.teacher_logprobs is None:
        return torch.zeros_like(values.logprobs)
    learner = values.logprobs if term.advantage_logprob == "learner" else batch.sampling_logprobs
    advantage = DIVERGENCES[term.divergence.name].advantage(learner, values.teacher_logprobs, term.parameter)
    clip = term.clip
    return F.clip(advantage, clip.low, clip.high) if isinstance(clip, ClipAdvantage) else advantage


def _returns(term: Term, values: TermValues, batch: TokenBatch, log_ratio: Tensor) -> Tensor:
    """The return of each token: the teacher's, the verifier's, or both.

    With `prefix_ratio` every advantage is weighted by the ratios that lead up to it.
    """
    if isinstance(term.signal, Score):
        returns = _rewards(term.signal.advantage, batch)
        return returns * _prefix_ratio(log_ratio, batch) if term.correction.name == "prefix_ratio" else returns
    if isinstance(term.reward, Modulate):
        assert values.teacher_logprobs is not None
        gap = values.teacher_logprobs - values.logprobs
        return modulate(_rewards(term.reward.advantage, batch), gap, term.reward.strength, term.reward.bound)
    returns = _teacher_returns(term, values, batch, log_ratio)
    if isinstance(term.reward, AddAdvantage):
        return F.add_reward(returns, _rewards(term.reward.advantage, batch), term.reward.coefficient)
    return returns


def _teacher_returns(term: Term, values: TermValues, batch: TokenBatch, log_ratio: Tensor) -> Tensor:
    gradient = term.gradient if isinstance(term.gradient, ScoreFunction) else ScoreFunction()
    advantage = _advantage(term, values, batch)
    if gradient.baseline == "kl":
        assert values.divergence is not None, "the capability check asks for candidates"
        advantage = advantage + values.divergence
    advantage = torch.where(values.answered, advantage, 0.0)
    if term.correction.name == "prefix_ratio":
        advantage = advantage * _prefix_ratio(log_ratio, batch)
    returns = advantage
    if gradient.gamma > 0:
        returns = _by_row(batch, advantage, lambda row: _to_go(row, gradient))
    return returns - _others_mean(returns, values, batch) if gradient.baseline == "group_mean" else returns


def _to_go(advantage: Tensor, gradient: ScoreFunction) -> Tensor:
    """The discounted advantages from each token on, or from the one after it; as a sum or a mean over those left."""
    returns = F.reward_to_go(advantage, gradient.gamma)
    left = torch.arange(len(advantage), 0, -1, dtype=returns.dtype) - gradient.start
    if gradient.start == 1:
        returns = returns - advantage
    return returns / left.clamp_min(1.0) if gradient.length == "mean" else returns


def _rewards(advantage: str, batch: TokenBatch) -> Tensor:
    """The advantage of each token's completion among those of its prompt; 0 where there is no reward."""
    by_row = [0.0] * len(batch.groups)
    for rows in batch.by_group():
        known = [(row, reward) for row in rows if (reward := batch.rewards[row]) is not None]
        values = ADVANTAGES[advantage].function([reward for _, reward in known])
        for (row, _), value in zip(known, values, strict=True):
            by_row[row] = value
    return torch.tensor([by_row[row] for row in batch.first])[batch.rows]


def _others_mean(returns: Tensor, values: TermValues, batch: TokenBatch) -> Tensor:
    """For each token the mean return of the *other* answered completions of its prompt (0 where there are none)."""
    count = len(batch.groups)
    sums = returns.new_zeros(count).index_add_(0, batch.rows, returns)
    sizes = returns.new_zeros(count).index_add_(0, batch.rows, values.answered.to(returns.dtype))
    names = {name: index for index, name in enumerate(dict.fromkeys(batch.groups))}
    group = torch.tensor([names[name] for name in batch.groups])
    other_sums = returns.new_zeros(len(names)).index_add_(0, group, sums)[group] - sums
    other_sizes = returns.new_zeros(len(names)).index_add_(0, group, sizes)[group] - sizes
    return (other_sums / other_sizes.clamp_min(1.0))[batch.rows]


def _by_row(batch: TokenBatch, values: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    lengths = torch.bincount(batch.rows, minlength=len(batch.groups)).tolist()
    return torch.cat([function(row) for row in values.split(lengths)])


def _log_ratio(term: Term, values: TermValues, batch: TokenBatch) -> Tensor:
    """The logarithm that the term's correction is about."""
    of, arguments = CORRECTIONS[term.correction.name].of, term.correction.arguments
    log_ratio = values.logprobs - batch.sampling_logprobs
    if of == "anchor" and values.teacher_logprobs is not None:
        alpha = float(arguments["alpha"])
        return alpha * log_ratio + (1.0 - alpha) * (values.logprobs - values.teacher_logprobs)
    return values.logprobs if of == "probability" else log_ratio


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
        loss_mask=values.answered,
        student_entropy=values.student_entropy,
        teacher_entropy=values.teacher_entropy,
        divergence=values.reverse_kl if values.divergence is None else values.divergence,
        logprobs=values.logprobs,
        teacher_logprobs=values.teacher_logprobs,
        positions=batch.positions,
        rows=batch.rows,
        teacher_rank=values.teacher_rank,
    )
    return WEIGHTS[term.weights.name].function(statistics, **term.weights.arguments)


def _kept(term: Term, batch: TokenBatch) -> list[bool]:
    """The rows that the term is about, by outcome and by who wrote them.

    Whether a group is solved is up to the student's own completions; those of others count where it has none.
    """
    right = [None if reward is None else reward >= 1.0 for reward in batch.rewards]
    solved_first = {row: any(right[row] for row in _own(rows, batch)) for rows in batch.by_group() for row in rows}
    solved = [solved_first[row] for row in batch.first]
    outcome = {
        "all": lambda row: True,
        "correct": lambda row: right[row] is True,
        "incorrect": lambda row: right[row] is False,
        "failed_group": lambda row: right[row] is not None and not solved[row],
        "solved_group": lambda row: solved[row],
    }[term.filter]
    return [outcome(row) and term.source in ("all", batch.sources[row]) for row in range(len(batch.groups))]


def _own(rows: Sequence[int], batch: TokenBatch) -> Sequence[int]:
    """Those of the rows that the student wrote, or all of them where it wrote none."""
    return [row for row in rows if batch.sources[row] == "student"] or rows


def _by_sample(term: Term, values: TermValues, batch: TokenBatch, kept: Sequence[bool]) -> Tensor:
    """What each token's completion counts: 0 where the term is not about it, else its sample weight."""
    by_row = [1.0] * len(kept)
    if term.samples.name != "uniform":
        answered = set(batch.rows[values.answered].tolist())
        student, teacher = _mean_nll(values.logprobs, batch), _mean_nll(values.teacher_logprobs, batch)
        for rows in batch.by_group():
            statistics = SampleStatistics(
                kept=[kept[row] and row in answered for row in rows],
                rewards=[batch.rewards[row] for row in rows],
                texts=[batch.texts[row] for row in rows],
                student_nll=[student[row] for row in rows],
                teacher_nll=[teacher[row] for row in rows],
            )
            weights = SAMPLE_WEIGHTS[term.samples.name].function(statistics, **term.samples.arguments)
            for row, weight in zip(rows, weights, strict=True):
                by_row[row] = weight
    counted = [by_row[first] * row for first, row in zip(batch.first, kept, strict=True)]
    return torch.tensor(counted, dtype=torch.float32)[batch.rows]


def _mean_nll(logprobs: Tensor | None, batch: TokenBatch) -> list[float]:
    """The mean negative log-probability of each row's tokens, 0 where nothing is known."""
    count = len(batch.groups)
    known = torch.zeros_like(batch.aggregate) if logprobs is None else logprobs.nan_to_num(0.0)
    sums = known.new_zeros(count).index_add_(0, batch.rows, -known)
    return (sums / torch.bincount(batch.rows, minlength=count).clamp_min(1)).tolist()
