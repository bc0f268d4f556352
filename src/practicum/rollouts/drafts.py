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
    counts = [count for rollout in rollouts for count in _count_tokens(rollout)]
    for rollout in rollouts:
        for part in () if is_replay(rollout) else rollout.rounds:
            room = len(rollout.tokens) - part.start
            for depth in range(min(part.accepted + 1, len(part.drafts), room)):
                examined[depth] = examined.get(depth, 0) + 1
                accepted[depth] = accepted.get(depth, 0) + (depth < part.accepted)
    if not counts:
        return {}
    total = sum(examined.values())
    return {
        "drafts/tokens_per_call": sum(counts) / len(counts),
        "drafts/acceptance": sum(accepted.values()) / total if total else 0.0,
        **{f"drafts/acceptance_{depth}": accepted[depth] / examined[depth] for depth in examined},
    }


def score_drafts(rollouts: Sequence[Rollout]) -> list[float]:
    """Return a score per prompt, with the tokens per call as their mean; empty without rounds.

    A score is this ratio of two sums plus the prompt's linear influence on it, so scores of the same
    prompts can be compared in pairs.
    """
    counts = dict[str, list[int]]()
    for rollout in rollouts:
        counts.setdefault(rollout.prompt.id, []).extend(_count_tokens(rollout))
    calls = sum(map(len, counts.values()))
    if not calls:
        return []
    mean, scale = sum(map(sum, counts.values())) / calls, len(counts) / calls
    return [mean + scale * (sum(part) - mean * len(part)) for part in counts.values()]


def _count_tokens(rollout: Rollout) -> list[int]:
    """Return the tokens of each call of the target, cut at the end of the text."""
    rounds = () if is_replay(rollout) else rollout.rounds
    return [min(part.accepted + 1, len(rollout.tokens) - part.start) for part in rounds]
