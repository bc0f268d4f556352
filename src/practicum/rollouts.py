"""From prompts to rollouts: rendered, sampled, read back as text, and rewarded."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from practicum.ports import SamplingClient, Task
from practicum.randomness import seed_of
from practicum.text import Renderer
from practicum.types import Prompt, Rollout, Sample, SampleRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class Batch:
    """Which completions to draw: `n` for each prompt, named by `stream` and `step` for their random streams."""

    prompts: Sequence[Prompt]
    n: int
    seed: int
    step: int
    stream: str = "rollout"


def prompts_of_step(prompts: Sequence[Prompt], seed: int, step: int, count: int) -> list[Prompt]:
    """The prompts of a step (counted from 1): every prompt once an epoch, in an order of its own each epoch.

    A pure function of (seed, step), so a resumed run sees what the uninterrupted one would have seen.
    """
    places = range((step - 1) * count, step * count)
    orders = {epoch: _shuffled(seed, epoch, len(prompts)) for epoch in {place // len(prompts) for place in places}}
    return [prompts[orders[place // len(prompts)][place % len(prompts)]] for place in places]


def _shuffled(seed: int, epoch: int, count: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed_of(seed, "epoch", epoch))).tolist()


def sample_rollouts(batch: Batch, client: SamplingClient, renderer: Renderer, params: SamplingParams) -> list[Rollout]:
    """Draw `batch.n` completions of each prompt; `policy_version` is the number of updates behind them."""
    places = _numbered(batch)
    requests = [
        SampleRequest(
            renderer.render(prompt.messages), seed_of(batch.seed, batch.stream, batch.step, prompt.id, number)
        )
        for prompt, number in places
    ]
    samples = client.sample(requests, params)
    return [
        _rollout(prompt, number, request, sample, renderer, batch.step - 1)
        for (prompt, number), request, sample in zip(places, requests, samples, strict=True)
    ]


def _numbered(batch: Batch) -> list[tuple[Prompt, int]]:
    """Each prompt with the number of its completion; a prompt that comes twice in a step goes on counting."""
    counts: dict[str, int] = {}
    places = []
    for prompt in batch.prompts:
        first = counts.get(prompt.id, 0)
        places += [(prompt, number) for number in range(first, first + batch.n)]
        counts[prompt.id] = first + batch.n
    return places


def rewarded(rollouts: Sequence[Rollout], task: Task) -> list[Rollout]:
    """The same rollouts with the task's reward."""
    return [replace(rollout, reward=task.reward(rollout.prompt, rollout.text)) for rollout in rollouts]


def _rollout(
    prompt: Prompt, number: int, request: SampleRequest, sample: Sample, renderer: Renderer, version: int
) -> Rollout:
    return Rollout(
        prompt=prompt,
        prompt_tokens=request.prompt_tokens,
        tokens=sample.tokens,
        loss_mask=torch.ones_like(sample.tokens, dtype=torch.bool),
        sampling_logprobs=sample.sampling_logprobs,
        policy_logprobs=sample.policy_logprobs,
        policy_version=version,
        stop_reason=sample.stop_reason,
        text=renderer.decode(sample.tokens.tolist()),
        sample=number,
    )
