"""Move a completion's advantage at the tokens that a right hint makes more or less likely."""

import torch
from torch import Tensor

from practicum.functional.advantages import RewardRule
from practicum.functional.weights import TokenStatistics, Weight


def compute_change(log_ratio: Tensor, scale: float, width: float, least: float) -> Tensor:
    """Return `scale` tanh(e / `width`), or 0 where its size is at most `least`.

    e is `log_ratio`, with the right hint's log-probability minus the wrong hints' as its target.
    ValueError if a parameter is not positive.
    """
    if not (scale > 0.0 and width > 0.0 and least >= 0.0):
        raise ValueError(
            f"contrast needs scale and width above 0 and least from 0 on, got {scale:g}, {width:g} "
            f"and {least:g}"
        )
    change = scale * torch.tanh(log_ratio.detach() / width)
    return torch.where(change.abs() > least, change, 0.0)


def _contrast(
    teacher: Tensor,
    reward: Tensor,
    log_ratio: Tensor,
    scale: float = 0.5,
    width: float = 0.02,
    least: float = 0.02,
) -> Tensor:
    """Return A plus the change of the token; see `compute_change`.

    A never changes its sign; where it is 0, it stays 0.
    """
    moved = reward + compute_change(log_ratio, scale, width, least)
    return torch.where(reward > 0, moved.clamp(min=0.0), moved.clamp(max=0.0)) * (reward != 0)


def _weigh_two_means(
    statistics: TokenStatistics,
    eta: float = 1.0,
    scale: float = 0.5,
    width: float = 0.02,
    least: float = 0.02,
) -> Tensor:
    """Weight tokens so that their mean is the mean over unmoved tokens plus `eta` times the mean
    over moved tokens.

    A token is moved if `contrast` changes its advantage with the same parameters. ValueError if
    `eta` is negative.
    """
    if eta < 0.0:
        raise ValueError(f"two_means needs eta from 0 on, got {eta:g}")
    target, student = statistics.teacher_logprobs, statistics.logprobs
    assert target is not None and student is not None, "an objective gives the statistics in needs"
    mask = statistics.loss_mask.bool()
    moved = mask & (compute_change(target - student, scale, width, least) != 0)
    unmoved = mask & ~moved
    count = mask.sum()
    factor, unmoved_factor = (count / tokens.sum().clamp(min=1) for tokens in (moved, unmoved))
    return torch.where(moved, eta * factor, 0.0) + torch.where(unmoved, unmoved_factor, 0.0)


contrast = RewardRule(
    "contrast",
    _contrast,
    "The reward's advantage, moved by the difference of a right and a wrong hint: RLCSD.",
    "2606.11709",
)
two_means = Weight(
    "two_means",
    _weigh_two_means,
    "one mean over the tokens that `contrast` moves, and one over the remaining tokens",
    "2606.11709",
    needs=("logprobs", "teacher_logprobs"),
    drops=False,
)
