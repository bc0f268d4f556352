"""The token side: one detached coefficient a token, from weights, corrections, rewards and the normalisation of the whole batch."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from practicum import functional as F
from practicum.functional.advantages import ADVANTAGES, modulate
from practicum.functional.divergences import DIVERGENCES
from practicum.functional.estimators import CORRECTIONS
from practicum.functional.samples import SAMPLE_WEIGHTS, SampleStatistics
from practicum.functional.weights import WEIGHTS, TokenStatistics
from practicum.objective.choices import AddAdvantage, ClipAdvantage, Modulate
from practicum.objective.estimators import ScoreFunction
from practicum.objective.spec import Term
from practicum.objective.tokens import TermValues, TokenBatch
from practicum.types import AUTHORS


@torch.no_grad()
def compute_coefficients(term: Term, values: TermValues, batch: TokenBatch) -> Float[Tensor, " T"]:
    """The detached coefficient of each token's value in the loss, 0 where nobody answered.

    For a differentiated value that is weight times aggregate; for a sampled token it is also times minus the return.
    Terms with `needs_sequences` must be given whole sequences.
    """
    if not values.answered.any():
        return torch.zeros_like(values.logprobs)
    selected = _kept(term, batch)
    coefficient = (
        term.coefficient
        * batch.aggregate
        * _weights(term, values, batch)
        * _compute_completion_weights(term, values, batch, selected)
    )
    log_ratio = _log_ratio(term, values, batch)
    if not term.on_sampled_token:
        coefficient = coefficient * _state_factor(term, log_ratio, batch)
    else:
        returns = _returns(term, values, batch, log_ratio)
        factor = 1.0 if _is_cumulative(term) else _token_factor(term, log_ratio, returns)
        coefficient = -coefficient * factor * returns
    return torch.where(values.answered & _written(term, batch), coefficient, 0.0)


def _advantage(term: Term, values: TermValues, batch: TokenBatch) -> Tensor:
    if values.teacher_logprobs is None:
        return torch.zeros_like(values.logprobs)
    learner = values.logprobs if term.advantage_logprob == "learner" else batch.sampling_logprobs
    advantage = DIVERGENCES[term.divergence.name].advantage(
        learner, values.teacher_logprobs, term.parameter
    )
    clip = term.clip
    return F.clip(advantage, clip.low, clip.high) if isinstance(clip, ClipAdvantage) else advantage


def _returns(term: Term, values: TermValues, batch: TokenBatch, log_ratio: Tensor) -> Tensor:
    """The return of each token: the teacher's, the verifier's, or both.

    With a cumulative correction all of it, baselines and rewards included, is weighted by the ratios that lead up to the token.
    """
    ratio = (
        _prefix_ratio(term, log_ratio, batch)
        if _is_cumulative(term)
        else torch.ones_like(log_ratio)
    )
    if term.signal.outcome is not None:
        return ratio * _rewards(term.signal.outcome, batch)
    if isinstance(term.reward, Modulate):
        assert values.teacher_logprobs is not None
        gap = values.teacher_logprobs - values.logprobs
        return ratio * modulate(
            _rewards(term.reward.advantage, batch), gap, term.reward.strength, term.reward.bound
        )
    returns = _teacher_returns(term, values, batch, ratio)
    if isinstance(term.reward, AddAdvantage):
        return F.add_reward(
            returns, ratio * _rewards(term.reward.advantage, batch), term.reward.coefficient
        )
    return returns


def _teacher_returns(term: Term, values: TermValues, batch: TokenBatch, ratio: Tensor) -> Tensor:
    """The teacher's advantages from each token on, each times its ratio, minus a baseline of the token's state.

    What is subtracted is taken from the return and not from each advantage: of the advantages of later tokens it would take
    their mean, which is what a return beyond this token has to say.
    """
    gradient = term.gradient if isinstance(term.gradient, ScoreFunction) else ScoreFunction()
    returns = torch.where(values.answered, ratio * _advantage(term, values, batch), 0.0)
    if gradient.gamma > 0:
        returns = _by_row(batch, returns, lambda row: _compute_returns_to_go(row, gradient))
    if gradient.baseline == "kl":
        assert values.divergence is not None, "the capability check asks for candidates"
        return returns + torch.where(values.answered, ratio * values.divergence, 0.0)
    return (
        returns - ratio * _compute_leave_one_out_mean(returns, values, batch)
        if gradient.baseline == "group_mean"
        else returns
    )


def _compute_returns_to_go(advantage: Tensor, gradient: ScoreFunction) -> Tensor:
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


def _compute_leave_one_out_mean(returns: Tensor, values: TermValues, batch: TokenBatch) -> Tensor:
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
    return CORRECTIONS[term.correction.name].function(
        log_ratio, advantage, **term.correction.arguments
    )


def _state_factor(term: Term, log_ratio: Tensor, batch: TokenBatch) -> Tensor:
    """The correction of a divergence at a state; how the state was reached does not depend on the token after it."""
    if _is_cumulative(term):
        return _prefix_ratio(term, log_ratio, batch) / log_ratio.exp()
    return _token_factor(term, log_ratio, -torch.ones_like(log_ratio))


def _is_cumulative(term: Term) -> bool:
    return CORRECTIONS[term.correction.name].cumulative


def _prefix_ratio(term: Term, log_ratio: Tensor, batch: TokenBatch) -> Tensor:
    """The product of the ratios of each sequence up to and including each token."""
    return _by_row(batch, log_ratio, lambda row: _token_factor(term, row, torch.ones_like(row)))


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
        special=batch.special,
    )
    return WEIGHTS[term.weights.name].function(statistics, **term.weights.arguments)


def _kept(term: Term, batch: TokenBatch) -> list[bool]:
    """The rows that the term is about, by outcome and by who wrote them.

    Whether a group is solved is up to the student's own completions; those of others count where it has none.
    """
    right = [None if reward is None else reward >= 1.0 for reward in batch.rewards]
    solved_first = {
        row: any(right[row] for row in _select_student_rows(rows, batch))
        for rows in batch.by_group()
        for row in rows
    }
    solved = [solved_first[row] for row in batch.first]
    outcome = {
        "all": lambda row: True,
        "correct": lambda row: right[row] is True,
        "incorrect": lambda row: right[row] is False,
        "failed_group": lambda row: right[row] is not None and not solved[row],
        "solved_group": lambda row: solved[row],
    }[term.filter]
    wrote = {row for row, source in enumerate(batch.sources) if term.source in ("all", source)}
    if term.source != "all":
        wrote |= set(batch.rows[_written(term, batch)].tolist())
    return [outcome(row) and row in wrote for row in range(len(batch.groups))]


def _written(term: Term, batch: TokenBatch) -> Bool[Tensor, " T"]:
    """Return True at the tokens of the term's writer."""
    if term.source == "all":
        return torch.ones_like(batch.authors, dtype=torch.bool)
    return batch.authors == AUTHORS.index(term.source)


def _select_student_rows(rows: Sequence[int], batch: TokenBatch) -> Sequence[int]:
    """Those of the rows that the student wrote, or all of them where it wrote none."""
    return [row for row in rows if batch.sources[row] == "student"] or rows


def _compute_completion_weights(
    term: Term, values: TermValues, batch: TokenBatch, kept: Sequence[bool]
) -> Tensor:
    """What each token's completion counts: 0 where the term is not about it, else its sample weight."""
    entry = SAMPLE_WEIGHTS[term.samples.name]
    by_row = [1.0] * len(kept)
    answered = set(batch.rows[values.answered].tolist())
    student = _mean_nll(values.logprobs, batch) if "student_nll" in term.samples_by else ()
    teacher = _mean_nll(values.teacher_logprobs, batch) if "teacher_nll" in term.samples_by else ()
    for rows in (
        batch.by_group() if entry.needs else ()
    ):  # a weight that looks at nothing is the same for all
        statistics = SampleStatistics(
            kept=[kept[row] and row in answered for row in rows],
            rewards=[batch.rewards[row] for row in rows],
            texts=[batch.texts[row] for row in rows],
            student_nll=[student[row] for row in rows if student],
            teacher_nll=[teacher[row] for row in rows if teacher],
        )
        weights = entry.function(statistics, **term.samples.arguments)
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
