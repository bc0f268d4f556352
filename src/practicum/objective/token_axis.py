"""Compute the token side of an objective: one detached coefficient a token.

It is the product of weights, corrections, rewards and the normalisation over the whole batch.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from practicum import functional as F
from practicum.functional.estimators import CORRECTIONS
from practicum.functional.samples import (
    SAMPLE_WEIGHTS,
    TOKEN_STATISTICS,
    SampleStatistics,
)
from practicum.functional.sequence import keep_span_starts, sum_spans
from practicum.functional.weights import WEIGHTS, TokenStatistics
from practicum.objective.estimator_call import EstimatorCall
from practicum.objective.pairs import compute_pair_coefficients
from practicum.objective.reward_axis import (
    compute_own_advantages,
    compute_reward_advantages,
    read_rewards,
)
from practicum.objective.spans import answers_for_ends, carry_to_next, compute_span_advantage
from practicum.objective.spec import Objective, Term
from practicum.objective.tokens import TermValues, TokenBatch
from practicum.types import AUTHORS


@torch.no_grad()
def compute_coefficients(term: Term, values: TermValues, batch: TokenBatch) -> Float[Tensor, " T"]:
    """Return the detached coefficient of each token's value in the loss, 0 without a signal.

    For a differentiated value it is weight times aggregate; for a sampled token it is also times
    minus the return; for pairs it is the derivative of their loss. Terms with `needs_sequences` need whole sequences here.
    """
    if term.needs_signal and values.divergence is None and values.teacher_logprobs is None:
        return torch.zeros_like(values.logprobs)
    if term.signal.pairs:
        return compute_pair_coefficients(term, values, batch)
    coefficient = (
        term.coefficient
        * batch.aggregate
        * _compute_token_weights(term, values, batch)
        * _compute_completion_weights(term, values, batch)
    )
    log_ratio = _compute_log_ratio(term, values, batch)
    if not term.on_sampled_token:
        coefficient = coefficient * _correct_states(term, log_ratio, batch)
    else:
        returns = _compute_returns(term, values, batch, log_ratio)
        factor = 1.0 if _is_cumulative(term) else _correct_tokens(term, log_ratio, returns)
        coefficient = -coefficient * factor * returns
    # Not a product with the mask: tokens without a signal hold NaN, and NaN times 0 is NaN.
    return torch.where(values.is_scored & _mask_source_tokens(term, batch), coefficient, 0.0)


def compute_all_coefficients(
    objective: Objective, values: Iterable[TermValues], batch: TokenBatch
) -> list[Float[Tensor, " T"]]:
    """Return `compute_coefficients` of each of the objective's terms, given one's values each."""
    pairs = zip(objective.losses, values, strict=True)
    return [compute_coefficients(term, term_values, batch) for term, term_values in pairs]


@torch.no_grad()
def find_dropped(
    term: Term, values: TermValues, batch: TokenBatch
) -> tuple[Bool[Tensor, " T"], Bool[Tensor, " T"]]:
    """Return the tokens that the term's correction takes out, and those that it could take out.

    A token without a return, or without a signal, is in neither.
    """
    log_ratio = _compute_log_ratio(term, values, batch)
    returns = -torch.ones_like(log_ratio)
    if term.on_sampled_token:
        returns = _compute_returns(term, values, batch, log_ratio)
    is_trained = values.is_scored & _mask_source_tokens(term, batch) & (returns != 0)
    return is_trained & (_correct_tokens(term, log_ratio, returns) == 0), is_trained


def compute_full_coefficients(
    objective: Objective,
    values_by_part: Sequence[Sequence[TermValues]],
    indices: Sequence[Tensor],
    batch: TokenBatch,
) -> list[Float[Tensor, " T"]]:
    """Return each term's coefficients of the full batch, from the values of its parts.

    Needed for terms whose coefficient of a token depends on other tokens, such as returns;
    `indices` place each part's tokens in the batch.
    """
    return compute_all_coefficients(objective, merge_parts(values_by_part, indices), batch)


def merge_parts(
    values_by_part: Sequence[Sequence[TermValues]], indices: Sequence[Tensor]
) -> list[TermValues]:
    """Return each term's values of the full batch, from those of its parts at `indices`."""
    # Parts reorder the tokens: `argsort` of their batch indices undoes it.
    order = torch.cat(list(indices)).argsort()
    by_term = zip(*values_by_part, strict=True)
    return [TermValues.concatenate(list(parts))[order] for parts in by_term]


def _compute_advantage(term: Term, values: TermValues, batch: TokenBatch) -> Tensor:
    """Return the advantage of each token, or that of its whole span at each token of the span."""
    if values.teacher_logprobs is None:
        return torch.zeros_like(values.logprobs)
    learner = values.logprobs if term.advantage_logprob == "learner" else batch.sampling_logprobs
    teacher = values.teacher_logprobs
    return term.clip.bound(compute_span_advantage(term, learner, teacher, batch))


def _compute_returns(
    term: Term, values: TermValues, batch: TokenBatch, log_ratio: Tensor
) -> Tensor:
    """Return the return of each token: the teacher's, the verifier's, or both.

    A cumulative correction weights all of it, baselines and rewards included, by the ratios up to
    the token.
    """
    ratio = torch.ones_like(log_ratio)
    if _is_cumulative(term):
        ratio = _compute_prefix_ratio(term, log_ratio, batch)
    if term.signal.outcome is not None:
        return ratio * compute_own_advantages(term, term.signal.outcome, batch)
    fixed = term.signal.compute_fixed_advantage(values.logprobs)
    if fixed is not None:
        return ratio * fixed
    returns = _compute_teacher_returns(term, values, batch, ratio)
    return _add_reward(term, returns, values, batch, ratio) if term.has_reward else returns


def _add_reward(
    term: Term, returns: Tensor, values: TermValues, batch: TokenBatch, ratio: Tensor
) -> Tensor:
    """Return the teacher's returns and the reward, joined by the term's rule."""
    rule = term.reward_rule
    advantages = compute_reward_advantages(term, term.reward_advantage, batch)
    log_ratio = torch.zeros_like(returns)
    if rule.reads_log_ratio:
        assert values.teacher_logprobs is not None, "the term was checked"
        log_ratio = values.teacher_logprobs - values.logprobs
    return rule.join(returns, ratio * advantages, log_ratio, term.reward.arguments)


def _compute_teacher_returns(
    term: Term, values: TermValues, batch: TokenBatch, ratio: Tensor
) -> Tensor:
    """Return the teacher's return of each token: advantages times ratios, minus a baseline."""
    gradient = term.gradient
    if term.signal.step:
        advantages = returns = _compute_step_returns(term, values, batch, ratio)
    else:
        advantages = ratio * _compute_advantage(term, values, batch)
        advantages = returns = torch.where(values.is_scored, advantages, 0.0)
    if gradient.accumulates:
        returns = _sum_returns(returns, gradient, batch)
    if batch.spans is not None and answers_for_ends(term):
        returns = returns + carry_to_next(advantages, batch.spans, batch)
    if gradient.subtracts == "kl":
        assert values.divergence is not None, "the capability check asks for candidates"
        return returns + torch.where(values.is_scored, ratio * values.divergence, 0.0)
    if gradient.subtracts == "group_mean":
        # The baseline is subtracted from the return and not from each advantage. In a sum over
        # later tokens it would remove their mean, which is what a return says beyond this token.
        return returns - ratio * _compute_leave_one_out_mean(returns, values, batch)
    return returns


def _sum_returns(advantages: Tensor, gradient: EstimatorCall, batch: TokenBatch) -> Tensor:
    """Return the return of each token; a span counts once in it, and its tokens share one."""
    if batch.spans is not None:
        advantages = keep_span_starts(advantages, batch.spans)
    pairs = torch.stack([advantages, batch.turn_numbers.to(advantages)], dim=-1)
    returns = _apply_by_row(
        batch, pairs, lambda row: gradient.compute_returns(row[:, 0], row[:, 1].long())
    )
    if batch.spans is None:
        return returns
    return sum_spans(keep_span_starts(returns, batch.spans), batch.spans)


def _compute_step_returns(
    term: Term, values: TermValues, batch: TokenBatch, ratio: Tensor
) -> Tensor:
    """Return the returns of raw logits, row by row; 0 at tokens without a signal."""
    if values.teacher_logits is None or values.teacher_values is None:
        return torch.zeros_like(values.logprobs)
    logits, state_values = (
        torch.where(values.is_scored, ratio * numbers, 0.0)
        for numbers in (values.teacher_logits, values.teacher_values)
    )
    pairs = torch.stack([logits, state_values], dim=-1)
    returns = _apply_by_row(
        batch, pairs, lambda row: F.step_returns(row[:, 0], row[:, 1], term.signal.step)
    )
    return torch.where(values.is_scored, returns, 0.0)


def _compute_leave_one_out_mean(returns: Tensor, values: TermValues, batch: TokenBatch) -> Tensor:
    """Return for each token the mean return of the *other* scored completions of its prompt.

    It is 0 if there are none.
    """
    count = len(batch.groups)
    sums = returns.new_zeros(count).index_add_(0, batch.rows, returns)
    sizes = returns.new_zeros(count).index_add_(0, batch.rows, values.is_scored.to(returns.dtype))
    names = {name: index for index, name in enumerate(dict.fromkeys(batch.groups))}
    group = torch.tensor([names[name] for name in batch.groups], device=returns.device)
    other_sums = returns.new_zeros(len(names)).index_add_(0, group, sums)[group] - sums
    other_sizes = returns.new_zeros(len(names)).index_add_(0, group, sizes)[group] - sizes
    return (other_sums / other_sizes.clamp_min(1.0))[batch.rows]


def _apply_by_row(
    batch: TokenBatch, values: Tensor, function: Callable[[Tensor], Tensor]
) -> Tensor:
    lengths = torch.bincount(batch.rows, minlength=len(batch.groups)).tolist()
    return torch.cat([function(row) for row in values.split(lengths)])


def _compute_log_ratio(term: Term, values: TermValues, batch: TokenBatch) -> Tensor:
    """Return the logarithm that the term's correction is a function of."""
    of, arguments = CORRECTIONS[term.correction.name].of, term.correction.arguments
    # The ratio is to the sampling distribution, temperature and truncation included.
    log_ratio = values.logprobs - batch.sampling_logprobs
    if of == "anchor" and values.teacher_logprobs is not None:
        alpha = float(arguments["alpha"])
        anchor = values.logprobs - values.teacher_logprobs
        # NaN where the teacher says nothing: it must not reach later tokens through a product.
        anchor = torch.where(anchor.isnan() & ~values.is_scored, log_ratio, anchor)
        return alpha * log_ratio + (1.0 - alpha) * anchor
    return values.logprobs if of == "probability" else log_ratio


def _correct_tokens(term: Term, log_ratio: Tensor, advantage: Tensor) -> Tensor:
    """Return the correction of each token by itself."""
    return CORRECTIONS[term.correction.name].function(
        log_ratio, advantage, **term.correction.arguments
    )


def _correct_states(term: Term, log_ratio: Tensor, batch: TokenBatch) -> Tensor:
    """Return the correction of a divergence at each state.

    The probability of reaching a state does not depend on the token after it.
    """
    if _is_cumulative(term):
        # The product up to the token, without the token's own ratio.
        return _compute_prefix_ratio(term, log_ratio, batch) / log_ratio.exp()
    return _correct_tokens(term, log_ratio, -torch.ones_like(log_ratio))


def _is_cumulative(term: Term) -> bool:
    return CORRECTIONS[term.correction.name].cumulative


def _compute_prefix_ratio(term: Term, log_ratio: Tensor, batch: TokenBatch) -> Tensor:
    """Return the product of the ratios of each sequence up to and including each token."""
    return _apply_by_row(
        batch, log_ratio, lambda row: _correct_tokens(term, row, torch.ones_like(row))
    )


def _compute_token_weights(term: Term, values: TermValues, batch: TokenBatch) -> Tensor:
    statistics = TokenStatistics(
        loss_mask=values.is_scored,
        student_entropy=values.student_entropy,
        teacher_entropy=values.teacher_entropy,
        divergence=values.reverse_kl if values.divergence is None else values.divergence,
        logprobs=values.logprobs,
        teacher_logprobs=values.teacher_logprobs,
        positions=batch.positions,
        rows=batch.rows,
        teacher_rank=values.teacher_rank,
        special=batch.special,
        turns=batch.turn_numbers,
    )
    return WEIGHTS[term.weights.name].function(statistics, **term.weights.arguments)


def _select_rows(term: Term, batch: TokenBatch) -> list[bool]:
    """Return True for the rows that the term's filter selects.

    A group is solved by the student's own completions; those of others count only if the student
    wrote none.
    """
    right = [None if reward is None else reward >= 1.0 for reward in read_rewards(term, batch)]
    solved_first: dict[int, bool] = {}
    for rows in batch.group_rows():
        is_solved = any(right[row] for row in _select_student_rows(rows, batch))
        solved_first |= dict.fromkeys(rows, is_solved)
    # Only first rows are in the groups; a repeated rollout takes the result of its first row.
    solved = [solved_first[row] for row in batch.first]
    outcome = {
        "all": lambda row: True,
        "correct": lambda row: right[row] is True,
        "incorrect": lambda row: right[row] is False,
        "failed_group": lambda row: right[row] is not None and not solved[row],
        "solved_group": lambda row: solved[row],
    }[term.filter]
    return [outcome(row) for row in range(len(batch.groups))]


def _mask_source_tokens(term: Term, batch: TokenBatch) -> Bool[Tensor, " T"]:
    """Return True at the tokens that the term's source wrote."""
    if term.source == "all":
        return torch.ones_like(batch.authors, dtype=torch.bool)
    return batch.authors == AUTHORS.index(term.source)


def _select_student_rows(rows: Sequence[int], batch: TokenBatch) -> Sequence[int]:
    """Return the rows that the student wrote, or all of them if it wrote none."""
    return [row for row in rows if batch.sources[row] == "student"] or rows


def _compute_completion_weights(term: Term, values: TermValues, batch: TokenBatch) -> Tensor:
    """Return the weight of each token's completion, 0 if it is not selected."""
    if term.samples_by.isdisjoint(TOKEN_STATISTICS):
        arguments = term.samples.arguments.items()
        key = ("completion weight", term.samples.name, *arguments, term.filter)
        key += (term.source, term.scorer)
        return batch.spread(key, lambda: _weigh_rows(term, batch, _select_rows(term, batch)))
    is_trained = values.is_scored & _mask_source_tokens(term, batch)
    trained_rows = set(batch.rows[is_trained].tolist())
    trains = [
        selected and row in trained_rows for row, selected in enumerate(_select_rows(term, batch))
    ]
    student, teacher = (
        _compute_mean_nll(logprobs, batch) if name in term.samples_by else []
        for name, logprobs in (
            ("student_nll", values.logprobs),
            ("teacher_nll", values.teacher_logprobs),
        )
    )
    weights = torch.tensor(_weigh_rows(term, batch, trains, student, teacher))
    return weights.to(batch.rows.device)[batch.rows]


def _weigh_rows(
    term: Term,
    batch: TokenBatch,
    trains: Sequence[bool],
    student_nll: Sequence[float] = (),
    teacher_nll: Sequence[float] = (),
) -> list[float]:
    """Return the weight of each row's completion, 0 for rows that the term does not train on."""
    entry = SAMPLE_WEIGHTS[term.samples.name]
    by_row, by_scorer = [1.0] * len(batch.groups), read_rewards(term, batch)
    of_source = [term.source in ("all", source) for source in batch.sources]
    # A weight that needs no statistic is 1 for every completion.
    for rows in batch.group_rows() if entry.needs else ():
        statistics = SampleStatistics(
            kept=[trains[row] and of_source[row] for row in rows],
            rewards=[by_scorer[row] for row in rows],
            texts=[batch.texts[row] for row in rows],
            student_nll=[student_nll[row] for row in rows if student_nll],
            teacher_nll=[teacher_nll[row] for row in rows if teacher_nll],
        )
        weights = entry.function(statistics, **term.samples.arguments)
        for row, weight in zip(rows, weights, strict=True):
            by_row[row] = weight
    return [by_row[first] * counts for first, counts in zip(batch.first, trains, strict=True)]


def _compute_mean_nll(logprobs: Tensor | None, batch: TokenBatch) -> list[float]:
    """Return the mean negative log-probability of each row's tokens, 0 if it is unknown."""
    count = len(batch.groups)
    nll = torch.zeros_like(batch.aggregate) if logprobs is None else -logprobs.nan_to_num(0.0)
    sums = nll.new_zeros(count).index_add_(0, batch.rows, nll)
    return (sums / torch.bincount(batch.rows, minlength=count).clamp_min(1)).tolist()
