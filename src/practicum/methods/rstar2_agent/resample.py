"""Oversample; keep a random share of the failures and preferably the cleanest correct answers.

Resampling on correct (rStar2-Agent 2508.20722): a correct answer with failed tool calls gets the
same reward as a clean answer, and so teaches bad calls. The same holds for an answer that is stated
twice or in the wrong format. Correct answers with fewer failed calls and a single stated answer are
therefore more likely to be kept, while failures are kept at random and stay diverse. The penalties
follow the released code.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field

from practicum.core.randomness import seed_of
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

CLEAN = 0.1
"""The minimum penalty of any answer, which keeps its weight finite; our own choice."""


class Config(SourceConfig):
    """Sample `factor` times as many answers and keep the cleanest correct ones (2508.20722).

    Failures are kept at random, in proportion to their share. Correct answers with few failed tool
    calls, and with a single answer in the task's `tags`, are more likely to be kept.
    """

    type: Literal["resample"] = "resample"
    factor: int = Field(default=2, ge=2)

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
            name: iter(self._choose(name, rollouts, counts[name]))
            for name, rollouts in by_prompt.items()
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

    def _choose(self, name: str, rollouts: Sequence[Rollout], count: int) -> list[Rollout]:
        """Select `count` of a prompt's answers, with an unchanged share of failures."""
        batch = self.sampler.batch
        draw = random.Random(seed_of(batch.seed, "resample", batch.step, name))
        right = [rollout for rollout in rollouts if classify_outcome(rollout) == "correct"]
        failures = [rollout for rollout in rollouts if classify_outcome(rollout) != "correct"]
        count_sure, remainder = divmod(len(right) * count, len(rollouts))
        # Round the share at random: deterministic rounding would keep one correct answer of two
        # either never or always.
        chance = random.Random(seed_of(batch.seed, "resample-share", batch.step, name)).random()
        most = count_sure + (chance < remainder / len(rollouts))
        # Weighted sampling without replacement: the largest u^(1/weight) (Efraimidis & Spirakis 2006).
        penalties = [compute_penalty(rollout, self.task) for rollout in right]
        keys = [-(draw.random() ** (CLEAN + penalty)) for penalty in penalties]
        ranked = [right[place] for place in sorted(range(len(right)), key=keys.__getitem__)]
        chosen = ranked[:most] + draw.sample(failures, count - most)
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        notes = {SAMPLED: _write_mean(rewards), PENALTY: _write_mean(penalties)}
        order = {id(rollout): place for place, rollout in enumerate(rollouts)}
        chosen.sort(key=lambda rollout: order[id(rollout)])
        return [replace(rollout, notes={**rollout.notes, **notes}) for rollout in chosen]


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
