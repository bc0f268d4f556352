"""The completions of a step: its prompts, and a key for each completion of each prompt."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from practicum.core.randomness import seed_of
from practicum.ports import SamplingClient
from practicum.types import Prompt, Sample, SampleRequest, SamplingParams

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """The completions to sample: `n` for each prompt.

    `seed`, `stream` and `step` name their random streams. `version` counts the optimizer steps
    behind the weights that sample; None means all steps before `step`.
    """

    prompts: Sequence[Prompt]
    n: int
    seed: int
    step: int
    stream: str = "rollout"
    version: int | None = None

    @property
    def policy_version(self) -> int:
        """Return the number of optimizer steps behind the weights that sample."""
        return self.step - 1 if self.version is None else self.version


@dataclass(frozen=True, slots=True)
class RolloutKey:
    """The identity of one completion of a batch: its prompt, and its number within that prompt."""

    prompt: Prompt
    number: int


def select_prompts(
    prompts: Sequence[Prompt], seed: int, step: int, count: int, *, in_order: bool = False
) -> list[Prompt]:
    """Return the prompts of a step (counted from 1): each prompt once per epoch, in a new order.

    With `in_order` every epoch has the order of `prompts`. The result depends only on (seed, step),
    so a resumed run sees the same prompts as an uninterrupted run.
    """
    positions = range((step - 1) * count, step * count)
    orders = {
        epoch: range(len(prompts))
        if in_order
        else shuffle_indices(len(prompts), seed, "epoch", epoch)
        for epoch in {position // len(prompts) for position in positions}
    }
    return [
        prompts[orders[position // len(prompts)][position % len(prompts)]] for position in positions
    ]


def call_by_group(keys: Sequence[Hashable], call: Callable[[list[int]], Sequence[T]]) -> list[T]:
    """Return the result of each row, with one `call` for all rows that have the same key."""
    results: dict[int, T] = {}
    for key in dict.fromkeys(keys):
        rows = [row for row, row_key in enumerate(keys) if row_key == key]
        results.update(zip(rows, call(rows), strict=True))
    return [results[row] for row in range(len(keys))]


def sample_to_lengths(
    clients: Sequence[SamplingClient],
    requests: Sequence[SampleRequest],
    lengths: Sequence[int],
    params: SamplingParams,
) -> list[Sample]:
    """Sample at most `lengths` tokens for each request from its own client.

    Requests for the same number of tokens from the same client share one call.
    """

    def sample(rows: list[int]) -> Sequence[Sample]:
        first = rows[0]
        limited = replace(params, max_new_tokens=lengths[first])
        return clients[first].sample([requests[row] for row in rows], limited)

    return call_by_group(list(zip(map(id, clients), lengths, strict=True)), sample)


def shuffle_indices(count: int, *name: int | str) -> list[int]:
    """Return the numbers below `count` in the random order that belongs to a name."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed_of(*name))).tolist()


def list_keys(batch: RolloutBatch, n: int) -> list[list[RolloutKey]]:
    """Return `n` keys for each prompt of the batch, grouped by prompt."""
    counts: dict[str, int] = {}
    groups = []
    for prompt in batch.prompts:
        # With few prompts, a step can contain the same prompt twice. Its completions then continue
        # the count, so that each completion has a separate random stream.
        first = counts.get(prompt.id, 0)
        counts[prompt.id] = first + n
        groups.append([RolloutKey(prompt, number) for number in range(first, first + n)])
    return groups


def list_all_keys(batch: RolloutBatch) -> list[RolloutKey]:
    """Return the keys of the batch's own `n` completions of each prompt, in order."""
    return [key for group in list_keys(batch, batch.n) for key in group]
