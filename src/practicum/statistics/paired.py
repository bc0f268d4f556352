"""Differences between two sets of scores on the same prompts, with intervals that remain valid for
few prompts.

A percentile bootstrap of equal differences has width zero: two prompts that both became right would
give a gain of exactly 1. Neither scipy nor statsmodels has a score interval of a paired difference,
so Tango's is written here; `tests/statistics/test_paired.py` counts its coverage.
"""

import math
from collections.abc import Sequence

import torch

from practicum.statistics.intervals import Interval, Z, bootstrap, wilson
from practicum.statistics.repeats import t_interval

FEWEST_PROMPTS = 10
"""Below this number of prompts, the number is shown instead of an interval."""

HALVINGS = 60
"""Steps of the bisection for an end of Tango's interval: they reach the last bit of a float."""


def difference(first: Sequence[float], second: Sequence[float], seed: int) -> Interval:
    """Return the mean of the paired differences `first - second` with its 95 % interval.

    Differences of one size (right and wrong answers: -1, 0 and 1) have Tango's interval, others a
    bootstrap over the pairs, or Student's t below `FEWEST_PROMPTS` pairs.
    """
    differences = [minuend - subtrahend for minuend, subtrahend in zip(first, second, strict=True)]
    sizes = {abs(value) for value in differences if value != 0.0}
    if len(sizes) <= 1:
        size = sizes.pop() if sizes else 1.0
        wins, losses = (sum(sign * value > 0 for value in differences) for sign in (1, -1))
        return _scale(score_interval(wins, losses, len(differences)), size)
    few = t_interval(differences) if len(differences) < FEWEST_PROMPTS else None
    return few or bootstrap(torch.tensor(differences, dtype=torch.float64), seed)


def score_interval(wins: int, losses: int, count: int) -> Interval:
    """Return the paired difference of two proportions with its score interval (Tango 1998).

    Of `count` pairs, `wins` are right only in the first sample and `losses` only in the second. The
    ends are the differences at which a score test at 5 % begins to reject.
    """
    mean = (wins - losses) / count
    low = _find_end(wins, losses, count, (-1.0, mean), Z)
    high = _find_end(wins, losses, count, (mean, 1.0), -Z)
    return Interval(mean, low, high)


def mean_score(scores: Sequence[float], seed: int) -> Interval:
    """Return the mean of scores with its 95 % interval: Wilson's if they are all equal or all 0
    or 1, else a bootstrap.
    """
    # Equal shares, such as four right answers of four to every prompt, have a bootstrap of width
    # zero. Wilson's interval is wide enough for any scores in [0, 1] with this mean.
    is_share = min(scores) >= 0.0 and max(scores) <= 1.0
    if is_share and (set(scores) <= {0.0, 1.0} or len(set(scores)) == 1):
        return wilson(sum(scores), len(scores))
    return bootstrap(torch.tensor(scores, dtype=torch.float64), seed)


def _find_end(
    wins: int, losses: int, count: int, between: tuple[float, float], target: float
) -> float:
    """Return the difference at which the score statistic, a decreasing function, is `target`."""
    low, high = between
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _compute_statistic(wins, losses, count, middle) > target:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _compute_statistic(wins: int, losses: int, count: int, assumed: float) -> float:
    """Return Tango's score statistic of an assumed difference, equation 8 of Tango (1998)."""
    # The maximum-likelihood share of losses under the assumed difference is the larger root of 2 n
    # q^2 + linear q + constant.
    linear = (2 * count - wins + losses) * assumed - wins - losses
    constant = -losses * assumed * (1 - assumed)
    root = math.sqrt(max(linear * linear - 8 * count * constant, 0.0))
    share = (root - linear) / (4 * count)
    variance = count * (2 * share + assumed * (1 - assumed))
    surplus = wins - losses - count * assumed
    if variance <= 0.0:
        return 0.0 if surplus == 0.0 else math.copysign(math.inf, surplus)
    return surplus / math.sqrt(variance)


def _scale(interval: Interval, factor: float) -> Interval:
    return Interval(factor * interval.mean, factor * interval.low, factor * interval.high)
