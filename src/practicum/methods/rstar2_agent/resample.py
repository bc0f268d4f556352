"""Oversample; keep the failures in their share and the cleanest correct answers.

Resampling on correct (GRPO-RoC of rStar2-Agent, 2508.20722): a correct answer with failed tool calls
gets the same reward as a clean answer, and so teaches bad calls. The same holds for an answer that
is stated twice or in the wrong format. The correct answers with the lowest penalties are therefore
kept, while failures are kept as sampled and stay diverse. Penalties, shares and minimums follow the
released code (microsoft/rStar, `rstar2_agent/down_sample`).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import Field

from practicum.ports import SamplingClient, Task
from practicum.ports.gate import ask_reward, count_answers
from practicum.rollouts.batch import RolloutKey
from practicum.rollouts.fields import classify_outcome
from practicum.rollouts.sampling import RolloutSampler
from practicum.rollouts.source import SourceConfig, SourceParts
from practicum.types import Metrics, Rollout

SAMPLED = "sampled_reward"
"""The note with the mean reward of all answers to the prompt, including dropped answers."""

PENALTY = "sampled_penalty"
"""The note with the mean penalty of the prompt's correct answers; empty without correct answers."""

NO_CALLS = 0.5
"""The penalty of an answer without tool calls, which has no share of failed calls."""


class Config(SourceConfig):
    """Sample `factor` times as many answers and keep the cleanest correct ones (2508.20722).

    Failures are kept in proportion to their share, the first sampled ones. Correct answers are ordered
    by failed tool calls and by how often they state the answer in the task's `tags`. At least `least`
    of both are kept, if sampled. A prompt with equal rewards has no loss.
    """

    type: Literal["resample"] = "resample"
    factor: int = Field(default=2, ge=2)
    least: int = Field(default=2, ge=0)

    def list_problems(self, n: int, max_new_tokens: int) -> list[str]:
        """Refuse minimums that do not fit into the kept answers."""
        if 2 * self.least <= n:
            return []
        return [
            f"rollout.source: resample(least={self.least}) keeps at least {self.least} failures and "
            f"{self.least} correct answers, and rollout.n is {n}; raise n or lower least"
        ]

    def collect(self, keys: Sequence[RolloutKey], parts: SourceParts) -> list[Rollout]:
        """Return a selection from the oversampled answers of the student."""
        writers = parts.writers
        assert writers.task is not None
        return CleanResampler(self, parts.sampler, writers.task, writers.student).collect(keys)

    @classmethod
    def measure(cls, rollouts: Sequence[Rollout]) -> Metrics:
        """Return the mean reward of all sampled answers and the mean penalty of the correct answers.

        Both include dropped answers. Empty if no source resamples.
        """
        metrics = {}
        for name in (SAMPLED, PENALTY):
            means = {
                rollout.prompt.id: float(rollout.notes[name])
                for rollout in rollouts
                if rollout.notes.get(name)
            }
            if means:
                metrics[name] = sum(means.values()) / len(means)
        return metrics


@dataclass(frozen=True, slots=True)
class CleanResampler:
    """Samples more answers than it keeps, with rewards from `task`."""

    source: Config
    sampler: RolloutSampler
    task: Task
    student: SamplingClient

    def collect(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """Return one rollout for each key, selected from `factor` times as many answers."""
        by_prompt: dict[str, list[Rollout]] = {key.prompt.id: [] for key in keys}
        for rollout in self._sample(keys):
            by_prompt[rollout.prompt.id].append(rollout)
        counts = Counter(key.prompt.id for key in keys)
        chosen = {
            name: iter(self._choose(rollouts, counts[name])) for name, rollouts in by_prompt.items()
        }
        return [replace(next(chosen[key.prompt.id]), sample=key.number) for key in keys]

    def _sample(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """Return all answers with their rewards; the first round equals the source `student`."""
        batch = self.sampler.batch
        streams = [batch.stream, *(f"resample-{turn}" for turn in range(1, self.source.factor))]
        rollouts: list[Rollout] = []
        for stream in streams:
            rollouts += self.sampler.switch_stream(stream).sample_student(keys, self.student)
        return [ask_reward(self.task, rollout) for rollout in rollouts]

    def _choose(self, rollouts: Sequence[Rollout], count: int) -> list[Rollout]:
        """Select `count` of a prompt's answers in their sampled order; equal rewards have no loss."""
        right = [rollout for rollout in rollouts if classify_outcome(rollout) == "correct"]
        failures = [rollout for rollout in rollouts if classify_outcome(rollout) != "correct"]
        penalties = {id(rollout): compute_penalty(rollout, self.task) for rollout in right}
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        means = {SAMPLED: _write_mean(rewards), PENALTY: _write_mean(list(penalties.values()))}
        most = share_places(len(right), len(failures), count, self.source.least)
        cleanest = sorted(right, key=lambda rollout: penalties[id(rollout)])[:most]
        members = {id(rollout) for rollout in cleanest + failures[: count - most]}
        chosen = [rollout for rollout in rollouts if id(rollout) in members]
        if not (right and failures):
            chosen = [
                replace(rollout, loss_mask=torch.zeros_like(rollout.loss_mask))
                for rollout in chosen
            ]
        return [replace(rollout, notes={**rollout.notes, **means}) for rollout in chosen]


def share_places(right: int, failures: int, count: int, least: int) -> int:
    """Return how many of `count` kept answers are correct, for the sampled numbers of both.

    The failures keep their share, rounded as Python rounds, and at least `least` of both are kept if
    they were sampled; the minimum of the correct answers comes first.
    """
    share = round(failures * count / (right + failures))
    kept_failures = max(share, min(least, failures))
    return max(count - kept_failures, min(least, right))


def compute_penalty(rollout: Rollout, task: Task) -> float:
    """Return the penalty of an answer: its share of failed calls plus its format penalty.

    0 is clean, and 2 is the maximum. The format counts only if the task requires one: the penalty is
    1 if the answer is missing or not in its tags, otherwise the number of repetitions per turn, at
    most 1.
    """
    calls = [call for turn in rollout.turns for call in turn.calls]
    failed = sum(call.outcome != "answered" for call in calls)
    penalty = failed / len(calls) if calls else NO_CALLS
    count = count_answers(task, rollout)
    if count is None:
        return penalty
    return penalty + (min((count - 1) / len(rollout.replies), 1.0) if count else 1.0)


def _write_mean(numbers: Sequence[float]) -> str:
    return f"{sum(numbers) / len(numbers):.6g}" if numbers else ""
