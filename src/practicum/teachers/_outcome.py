"""The verifier's verdict on a completion, as a word."""

from typing import Literal

from practicum.types import Rollout

Outcome = Literal["correct", "incorrect", "unknown"]


def classify_outcome(rollout: Rollout) -> Outcome:
    """Return `correct` from reward 1 on, `incorrect` below it, `unknown` without a reward."""
    if rollout.reward is None:
        return "unknown"
    return "correct" if rollout.reward >= 1 else "incorrect"
