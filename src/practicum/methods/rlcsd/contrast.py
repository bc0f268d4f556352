"""Move a completion's advantage at the tokens that a right hint makes more or less likely."""

import torch
from torch import Tensor

from practicum.functional.advantages import RewardRule


def _contrast(
    teacher: Tensor,
    reward: Tensor,
    log_ratio: Tensor,
    scale: float = 0.5,
    width: float = 0.02,
    least: float = 0.02,
) -> Tensor:
    """Return A + `scale` tanh(e / `width`), without the second summand where it is at most `least`.

    e is `log_ratio`, with the right hint's log-probability minus the wrong hint's as its target. A
    never changes its sign; where it is 0, it stays 0. ValueError if a parameter is not positive.
    """
    if not (scale > 0.0 and width > 0.0 and least >= 0.0):
        raise ValueError(
            f"contrast needs scale and width above 0 and least from 0 on, got {scale:g}, {width:g} "
            f"and {least:g}"
        )
    change = scale * torch.tanh(log_ratio.detach() / width)
    moved = reward + change * (change.abs() > least)
    return torch.where(reward > 0, moved.clamp(min=0.0), moved.clamp(max=0.0)) * (reward != 0)


contrast = RewardRule(
    "contrast",
    _contrast,
    "The reward's advantage, moved by the difference of a right and a wrong hint: RLCSD.",
    "2606.11709",
)
