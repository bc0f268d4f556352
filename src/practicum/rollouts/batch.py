"""Which completions a step writes: its prompts, and a number for each completion of each."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from practicum.core.randomness import seed_of
from practicum.types import Prompt


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """Which completions to draw: `n` for each prompt, named by `stream` and `step` for their random streams.

    `version` counts the steps that the student has learned who draws them; None: all before `step`.
    """

    prompts: Sequence[Prompt]
    n: int
    seed: int
    step: int
    stream: str = "rollout"
    version: int | None = None

    @property
    def policy_version(self) -> int:
        """How many steps the student has learned who draws them."""
        return self.step - 1 if self.version is None else self.version


@dataclass(frozen=True, slots=True)
class RolloutKey:
    """One completion of a batch, still to be written: its prompt, and its number among those of the prompt."""

    prompt: Prompt
    number: int


def select_prompts(prompts: Sequence[Prompt], seed: int, step: int, count: int) -> list[Prompt]:
    """The prompts of a step (counted from 1): every prompt once an epoch, in an order of its own each epoch.

    A pure function of (seed, step), so a resumed run sees what the uninterrupted one would have seen.
    """
    places = range((step - 1) * count, step * count)
    orders = {
        epoch: permute(len(prompts), seed, "epoch", epoch)
        for epoch in {p // len(prompts) for p in places}
    }
    return [prompts[orders[place // len(prompts)][place % len(prompts)]] for place in places]


def permute(count: int, *name: int | str) -> list[int]:
    """The numbers below `count` in an order that belongs to a name."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed_of(*name))).tolist()


def enumerate_keys(batch: RolloutBatch, more: int = 0) -> list[list[RolloutKey]]:
    """The `n + more` places of each prompt; a prompt that comes twice in a step goes on counting."""
    counts: dict[str, int] = {}
    groups = []
    for prompt in batch.prompts:
        first = counts.get(prompt.id, 0)
        counts[prompt.id] = first + batch.n + more
        groups.append([RolloutKey(prompt, number) for number in range(first, counts[prompt.id])])
    return groups
