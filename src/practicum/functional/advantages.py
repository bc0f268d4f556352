"""Rewards of whole completions, brought to tokens."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from practicum.functional.precision import precise


def group_centre(rewards: Sequence[float]) -> list[float]:
    """The rewards of one prompt's completions minus their mean, not divided by their spread (arXiv 2503.20783)."""
    mean = sum(rewards) / max(len(rewards), 1)
    return [reward - mean for reward in rewards]


def add_reward(advantage: Float[Tensor, " T"], reward: float, weight: float) -> Float[Tensor, " T"]:
    """The distillation advantage plus `weight` times one reward for every token (MOPD, arXiv 2601.02780)."""
    return precise(advantage.detach()) + weight * reward


def clip(advantage: Float[Tensor, " T"], low: float, high: float) -> Float[Tensor, " T"]:
    """The advantage held within [low, high]; a clipped token keeps its gradient, unlike one whose loss is clipped."""
    if low > high:
        raise ValueError(f"clip needs low <= high, got low {low} and high {high}")
    return precise(advantage.detach()).clamp(low, high)
