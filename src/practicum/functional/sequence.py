"""Operations along the tokens of a sequence, and the loss coefficient of each token of a batch."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum.functional.precision import precise

AGGREGATES = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")
"""The ways to turn per-token losses into one number."""


def gather_logprobs(logprobs: Float[Tensor, "*s V"], ids: Int[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Return the log-probability of one id at each position."""
    return precise(logprobs.gather(-1, ids.long().unsqueeze(-1)).squeeze(-1))


def reward_to_go(values: Float[Tensor, " T"], gamma: float) -> Float[Tensor, " T"]:
    """Return the discounted sum of each value and all later values, `sum_{t' >= t} gamma**(t' - t)
    * v_t'`.

    The power is relative to t, as in MiniLLM (arXiv 2306.08543) and unlike the absolute
    `gamma**t'`.
    """
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma must be in [0, 1], got {gamma}")
    total, step = precise(values), 1
    # Doubling: after the round with `step`, each entry sums the next 2 * step values.
    while gamma > 0.0 and step < len(values):
        total = total + gamma**step * torch.nn.functional.pad(total[step:], (0, step))
        step *= 2
    return total


def turn_returns(
    values: Float[Tensor, " T"], turns: Int[Tensor, " T"], gamma: float
) -> Float[Tensor, " T"]:
    """Return the sum of the values from each token to the end of its turn, plus the values of later
    turns, weighted by `gamma` to the power of their distance in turns.

    `turns` has the turn number of each token, in non-decreasing order.
    """
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma must be in [0, 1], got {gamma}")
    values = precise(values)
    _, counts = torch.unique_consecutive(turns, return_counts=True)
    bounds = [0, *counts.cumsum(0).tolist()]
    # Turns are summed one by one: a difference of sums over all turns would lose digits.
    later, returns = values.new_zeros(()), []
    for start, end in reversed(list(pairwise(bounds))):
        turn_sums = reward_to_go(values[start:end], 1.0)
        returns.append(turn_sums + gamma * later)
        later = turn_sums[0] + gamma * later
    return torch.cat(returns[::-1]) if returns else values


def sum_spans(values: Float[Tensor, " T"], spans: Int[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Return the sum over its span at each value; a span is a run of equal numbers in `spans`."""
    places, count = _number_spans(spans)
    return values.new_zeros(count).index_add_(0, places, values)[places]


def add_later(values: Float[Tensor, "T *s"], lengths: Int[Tensor, " T"]) -> Float[Tensor, "T *s"]:
    """Add to the first value of each group the later values of the group; others stay unchanged.

    `lengths` has the length of a group at its first value, and 0 elsewhere.
    """
    firsts = lengths.nonzero()[:, 0]
    owners = firsts.repeat_interleave(lengths[firsts] - 1)
    # Count the later values of each group from 1.
    numbers = torch.ones_like(owners).cumsum(0) - torch.searchsorted(owners, owners)
    return values.index_add(0, owners, values[owners + numbers])


def share_spans(
    values: Float[Tensor, " T"],
    logprobs: Float[Tensor, " T"],
    spans: Int[Tensor, " T"],
    share: Literal["even", "surprise"],
) -> Float[Tensor, " T"]:
    """Return the part of its span's value that each token gets, so that parts add up to the value.

    Parts are equal, or proportional to the token's share of the span's log S (DPCA, arXiv
    2606.09456). A span with probability 1 is shared evenly. No share is a gradient: see `sum_spans`
    for the whole value.
    """
    parts = 1.0 / sum_spans(torch.ones_like(values), spans)
    if share == "surprise":
        # Each branch is finite where it is selected: a span with probability 1 would divide by 0.
        totals = sum_spans(logprobs, spans)
        parts = torch.where(totals == 0, parts, logprobs / totals)
    return values * parts


def keep_span_starts(values: Float[Tensor, " T"], spans: Int[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Return the values with all but the first value of each span set to 0."""
    is_start = torch.ones_like(spans, dtype=torch.bool)
    is_start[1:] = spans[1:] != spans[:-1]
    return torch.where(is_start, values, 0.0)


def _number_spans(spans: Int[Tensor, " T"]) -> tuple[Int[Tensor, " T"], int]:
    """Return the index of each value's span, starting at 0, and the number of spans."""
    unique, places = torch.unique_consecutive(spans, return_inverse=True)
    return places, len(unique)


def generalized_advantages(
    rewards: Float[Tensor, " T"], values: Float[Tensor, " T"], gamma: float, gae_lambda: float
) -> Float[Tensor, " T"]:
    """Return `sum_{l >= 0} (gamma lambda)**l d_{t+l}` with `d_t = r_t + gamma v_{t+1} - v_t` (GAE,
    arXiv 1506.02438); the value after the last step is 0.

    With lambda 1 it is the discounted reward-to-go minus the value, with lambda 0 it is d_t.
    """
    later = torch.nn.functional.pad(values[1:], (0, 1))
    return reward_to_go(rewards + gamma * later - values, gamma * gae_lambda)


def step_returns(
    logits: Float[Tensor, " T"], values: Float[Tensor, " T"], k: int
) -> Float[Tensor, " T"]:
    """Return `sum_j q_{t + jk} - V_{t + (j + 1)k}` with V = 0 after the last token (KETCHUP, arXiv
    2504.19024).

    `logits` q belong to the tokens and `values` V to the states before them. With k = 1 every
    token's difference counts; if k is the whole length, only the first logit does.
    """
    if k < 1:
        raise ValueError(f"step_returns needs k of 1 or more, got {k}")
    logits, values = precise(logits.detach()), precise(values.detach())
    total = logits - torch.nn.functional.pad(values[k:], (0, min(k, len(values))))
    step = k
    # Doubling, as in `reward_to_go`.
    while step < len(total):
        total = total + torch.nn.functional.pad(total[step:], (0, step))
        step *= 2
    return total


def token_coefficients(
    lengths: Sequence[int], aggregate: str, norm: float | None = None
) -> list[float]:
    """Return the coefficient of each token of sequence i, so that `sum(coefficient * loss)` is the
    batch's aggregate.

    `lengths` are the numbers of supervised tokens of all sequences of the batch, including
    sequences processed elsewhere: the sum is then the same for every split into micro-batches. B
    counts the sequences with at least one supervised token.

    - token_mean: `1 / sum(lengths)`
    - seq_mean_token_mean: `1 / (B * length)`
    - seq_mean_token_sum: `1 / B`, the true sequence-level objective
    - seq_mean_token_sum_norm: `1 / (B * norm)` with a constant `norm` (Dr. GRPO, arXiv 2503.20783)
    """
    if aggregate not in AGGREGATES:
        raise ValueError(f"no aggregate named {aggregate!r}; known: {', '.join(AGGREGATES)}")
    if any(length < 0 for length in lengths):
        raise ValueError(f"lengths must not be negative, got {list(lengths)}")
    limit = norm or 0.0
    if aggregate == "seq_mean_token_sum_norm" and limit <= 0:
        raise ValueError(
            "seq_mean_token_sum_norm needs a positive norm,"
            f" for example the token limit; got {norm}"
        )
    total, sequences = sum(lengths), sum(length > 0 for length in lengths)
    denominators = {
        "token_mean": lambda length: total,
        "seq_mean_token_mean": lambda length: sequences * length,
        "seq_mean_token_sum": lambda length: sequences,
        "seq_mean_token_sum_norm": lambda length: sequences * limit,
    }
    return [1.0 / denominators[aggregate](length) if length else 0.0 for length in lengths]
