"""A clip may weaken a gradient; the three recommended clips never reverse one."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from papers.worlds import RolloutBatch, gradient, random_batch

from practicum.functional.divergences import DIVERGENCES

seeds = st.integers(0, 10**6)
bounds = st.floats(1e-4, 5.0)
vocabularies = st.integers(2, 12)
DIFFERENTIATED = [
    "forward_kl",
    "reverse_kl",
    "jsd(0.3)",
    "skew_forward_kl(0.2)",
    "mixed_kl(0.4)",
    "tvd",
]
REWARDS = ["reverse_kl", "forward_kl", "jsd(0.3)"]


def against(choice: dict[str, Any], clip: str, batch: RolloutBatch) -> torch.Tensor:
    """Return where [T, V] the clipped and the unclipped loss push a logit in opposite directions."""
    clipped, plain = gradient({**choice, "clip": clip}, batch), gradient(choice, batch)
    return clipped * plain < -1e-15


@given(seeds, vocabularies, st.sampled_from(DIFFERENTIATED), st.none() | bounds)
def test_a_clipped_loss_never_points_against_the_loss(
    seed: int, vocabulary: int, divergence: str, maximum: float | None
) -> None:
    clip = "none" if maximum is None else f"loss({maximum})"
    assert not against({"divergence": divergence}, clip, random_batch(seed, vocabulary)).any()


@given(seeds, vocabularies, st.sampled_from(REWARDS), bounds, bounds)
def test_a_clipped_advantage_never_points_against_the_advantage(
    seed: int, vocabulary: int, divergence: str, low: float, high: float
) -> None:
    choice = {"signal": "sampled", "divergence": divergence}
    assert not against(choice, f"advantage({-low}, {high})", random_batch(seed, vocabulary)).any()


@given(seeds, vocabularies, st.floats(1e-3, 0.2))
def test_clipped_entries_of_forward_kl_are_pushed_the_other_way(
    seed: int, vocabulary: int, maximum: float
) -> None:
    """Without its own term, a token that the teacher prefers is only pushed down by the remaining tokens, through the softmax."""
    batch = random_batch(seed, vocabulary)
    parts = DIVERGENCES["forward_kl"].contributions(batch.S, batch.T, None)
    clipped = parts > maximum
    assert torch.equal(
        against({"divergence": "forward_kl"}, f"entries({maximum})", batch) & clipped, clipped
    )
