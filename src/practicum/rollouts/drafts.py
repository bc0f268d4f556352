"""Read what speculative decoding recorded about a text: depths, acceptance, tokens per call."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from practicum.types import Metrics, Rollout


def read_depths(rollout: Rollout) -> Int[Tensor, " T"]:
    """Return the depth at which each token was drafted or replaced; -1 if no draft was for it."""
    depths = torch.full((len(rollout.tokens),), -1)
    for number, part in enumerate(rollout.rounds):
        later = rollout.rounds[number + 1 :]
        end = later[0].start if later else len(depths)
        count = max(min(len(part.drafts), end - part.start), 0)
        depths[part.start : part.start + count] = torch.arange(count)
    return depths


def is_replay(rollout: Rollout) -> bool:
    """Return True if the tokens hold drafts after a rejected one, which no text has."""
    return any(part.start + part.accepted + 1 < len(rollout.tokens) for part in rollout.rounds[-1:])


def measure_drafts(rollouts: Sequence[Rollout]) -> Metrics:
    """Return the acceptance by depth, its mean, and the tokens per call of the target.

    A draft after a rejected one, or after the end of the text, is not examined. The call that reads
    the prompt is not counted, and neither are replays. Empty without rounds.
    """
    examined, accepted = dict[int, int](), dict[int, int]()
    tokens = calls = 0
    for rollout in rollouts:
        for part in () if is_replay(rollout) else rollout.rounds:
            room = len(rollout.tokens) - part.start
            for depth in range(min(part.accepted + 1, len(part.drafts), room)):
                examined[depth] = examined.get(depth, 0) + 1
                accepted[depth] = accepted.get(depth, 0) + (depth < part.accepted)
            tokens += min(part.accepted + 1, room)
            calls += 1
    if not calls:
        return {}
    total = sum(examined.values())
    return {
        "drafts/tokens_per_call": tokens / calls,
        "drafts/acceptance": sum(accepted.values()) / total if total else 0.0,
        **{f"drafts/acceptance_{depth}": accepted[depth] / examined[depth] for depth in examined},
    }
