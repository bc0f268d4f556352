"""Compute the return of each sampled token: the teacher's, the verifier's, or both."""

from collections.abc import Callable

import torch
from torch import Tensor

from practicum import functional as F
from practicum.functional.sequence import keep_span_starts, sum_spans
from practicum.losses.reward_axis import compile_outcome, compile_reward
from practicum.losses.spans import carry_to_next, compile_span_advantage
from practicum.losses.tokens import TermValues, TokenBatch
from practicum.objective.estimator_call import EstimatorCall
from practicum.objective.spec import Term

Returns = Callable[[TermValues, TokenBatch, Tensor], Tensor]
"""A function that returns one number per token. The last argument has the ratios of the term's
cumulative correction up to each token, or 1 without a correction: they weight the whole return,
baselines and rewards included.
"""


def compile_returns(term: Term) -> Returns:
    """Return the function that computes the returns of a term."""
    signal = term.signal
    if signal.outcome is not None:
        comparison = compile_outcome(term, signal.outcome)
        return lambda values, batch, ratio: ratio * comparison.compute(batch)
    by_teacher = _compile_teacher_returns(term)
    complete = _add_reward(term, by_teacher) if term.has_reward else by_teacher

    def compute(values: TermValues, batch: TokenBatch, ratio: Tensor) -> Tensor:
        # Only the signal knows whether it has a fixed advantage, which may depend on the
        # log-probabilities.
        fixed = signal.compute_fixed_advantage(values.logprobs)
        return complete(values, batch, ratio) if fixed is None else ratio * fixed

    return compute


def _compile_teacher_returns(term: Term) -> Returns:
    """Return the function of the teacher's returns: advantages times ratios, minus a baseline."""
    gradient = term.gradient
    compute_advantages = _compile_steps(term) if term.signal.step else _compile_advantages(term)
    # Looked up here and not at each token, so that an unknown name fails before the update.
    subtract = BASELINES[gradient.subtracts]
    carries = term.signal.answers_for_ends

    def compute(values: TermValues, batch: TokenBatch, ratio: Tensor) -> Tensor:
        advantages = returns = compute_advantages(values, batch, ratio)
        if gradient.accumulates:
            returns = _sum_returns(advantages, gradient, batch)
        if batch.spans is not None and carries:
            returns = returns + carry_to_next(advantages, batch.spans, batch)
        return subtract(returns, values, batch, ratio)

    return compute


def _compile_advantages(term: Term) -> Returns:
    """Return the function of the advantages: of each token, or of its span at all of its tokens."""
    by_learner, bound = term.advantage_logprob == "learner", term.clip.bound
    compare = compile_span_advantage(term)

    def compute(values: TermValues, batch: TokenBatch, ratio: Tensor) -> Tensor:
        if values.teacher_logprobs is None:
            return torch.zeros_like(values.logprobs)
        student = values.logprobs if by_learner else batch.sampling_logprobs
        advantages = ratio * bound(compare(student, values.teacher_logprobs, batch))
        return torch.where(values.is_scored, advantages, 0.0)

    return compute


def _compile_steps(term: Term) -> Returns:
    """Return the function of the returns of raw logits, row by row; 0 without a signal."""
    step = term.signal.step

    def compute(values: TermValues, batch: TokenBatch, ratio: Tensor) -> Tensor:
        if values.teacher_logits is None or values.teacher_values is None:
            return torch.zeros_like(values.logprobs)
        logits, state_values = (
            torch.where(values.is_scored, ratio * numbers, 0.0)
            for numbers in (values.teacher_logits, values.teacher_values)
        )
        pairs = torch.stack([logits, state_values], dim=-1)
        returns = batch.apply_by_row(pairs, lambda row: F.step_returns(row[:, 0], row[:, 1], step))
        return torch.where(values.is_scored, returns, 0.0)

    return compute


def _add_reward(term: Term, compute_returns: Returns) -> Returns:
    """Return the function of these returns and the reward, joined by the term's rule."""
    rule, arguments, comparison = term.reward_rule, term.reward.arguments, compile_reward(term)

    def compute(values: TermValues, batch: TokenBatch, ratio: Tensor) -> Tensor:
        returns = compute_returns(values, batch, ratio)
        log_ratio = torch.zeros_like(returns)
        if rule.reads_log_ratio and values.teacher_logprobs is not None:
            log_ratio = torch.where(
                values.is_scored, values.teacher_logprobs - values.logprobs, 0.0
            )
        return rule.join(returns, ratio * comparison.compute(batch), log_ratio, arguments)

    return compute


def _sum_returns(advantages: Tensor, gradient: EstimatorCall, batch: TokenBatch) -> Tensor:
    """Return the return of each token; a span counts once in it, and its tokens share one."""
    if batch.spans is not None:
        advantages = keep_span_starts(advantages, batch.spans)
    pairs = torch.stack([advantages, batch.turn_numbers.to(advantages)], dim=-1)
    returns = batch.apply_by_row(
        pairs, lambda row: gradient.compute_returns(row[:, 0], row[:, 1].long())
    )
    if batch.spans is None:
        return returns
    return sum_spans(keep_span_starts(returns, batch.spans), batch.spans)


def _subtract_nothing(
    returns: Tensor, values: TermValues, batch: TokenBatch, ratio: Tensor
) -> Tensor:
    return returns


def _subtract_divergence(
    returns: Tensor, values: TermValues, batch: TokenBatch, ratio: Tensor
) -> Tensor:
    """Return the returns plus the divergence at the state, which is minus the mean advantage."""
    assert values.divergence is not None, "the capability check asks for candidates"
    return returns + torch.where(values.is_scored, ratio * values.divergence, 0.0)


def _subtract_group_mean(
    returns: Tensor, values: TermValues, batch: TokenBatch, ratio: Tensor
) -> Tensor:
    """Return the returns minus the mean return of the prompt's other completions."""
    # The baseline is subtracted from the return and not from each advantage. In a sum over later
    # tokens it would remove their mean, which is the information in a return beyond this token.
    return returns - ratio * _compute_leave_one_out_mean(returns, values, batch)


BASELINES = {
    "none": _subtract_nothing,
    "kl": _subtract_divergence,
    "group_mean": _subtract_group_mean,
}
"""The functions that subtract the baseline of an estimator."""


def _compute_leave_one_out_mean(returns: Tensor, values: TermValues, batch: TokenBatch) -> Tensor:
    """Return for each token the mean return of the *other* scored completions of its prompt.

    It is 0 without other scored completions.
    """
    count = len(batch.groups)
    sums = returns.new_zeros(count).index_add_(0, batch.rows, returns)
    sizes = returns.new_zeros(count).index_add_(0, batch.rows, values.is_scored.to(returns.dtype))
    names = {name: index for index, name in enumerate(dict.fromkeys(batch.groups))}
    group = torch.tensor([names[name] for name in batch.groups], device=returns.device)
    other_sums = returns.new_zeros(len(names)).index_add_(0, group, sums)[group] - sums
    other_sizes = returns.new_zeros(len(names)).index_add_(0, group, sizes)[group] - sizes
    return (other_sums / other_sizes.clamp_min(1.0))[batch.rows]
