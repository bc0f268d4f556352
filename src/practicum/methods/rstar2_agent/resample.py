"""More answers than are trained on: failures are kept as they come, right answers by how clean they are.

Resampling on correct (rStar2-Agent 2508.20722): an answer that is right after failed calls of tools is
rewarded like a clean one, and teaches to call badly; so is one that is stated twice, or in no form.
So right answers with fewer failed calls that state their answer once are kept rather than others,
while failures stay as varied as they are. The penalties are those of the released code.
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
"""The note with the mean reward of all answers to the prompt, those that were dropped included."""

PENALTY = "sampled_penalty"
"""The note with the mean penalty of its right answers, likewise; empty if there is none."""

NO_CALLS = 0.5
"""The penalty of an answer without a call, in the place of its share of failed calls."""

CLEAN = 0.1
"""The penalty that even a clean answer has, so that its weight is finite; a choice of ours."""


class Config(SourceConfig):
    """The student writes `factor` times as many; kept are clean right ones and any failures (2508.20722).

    Failures are kept by chance, as many as is their share. Of right answers those with few failed
    calls of tools are rather kept, and those that state their answer once, in the task's `tags`.
    """

    type: Literal["resample"] = "resample"
    factor: int = Field(default=2, ge=2)

    def collect(self, keys: Sequence[RolloutKey], parts: SourceParts) -> list[Rollout]:
        """Return a choice among more of the student's answers."""
        writers = parts.writers
        assert writers.task is not None
        return CleanResampler(self, parts.sampler, writers.task, writers.student).collect(keys)

    @classmethod
    def measure(cls, rollouts: Sequence[Rollout]) -> Metrics:
        """Return the mean reward of all sampled answers, and the penalty of the right ones."""
        return measure_resampled(rollouts)


@dataclass(frozen=True, slots=True)
class CleanResampler:
    """A source that samples more than it keeps: its settings, the student, and who rewards."""

    source: Config
    sampler: RolloutSampler
    task: Task
    student: SamplingClient

    def collect(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """Return one rollout for each key, chosen among `factor` times as many to its prompt."""
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
        """Return all answers with their rewards; those of the first round are `student`'s own."""
        batch = self.sampler.batch
        streams = [batch.stream, *(f"resample-{turn}" for turn in range(1, self.source.factor))]
        rollouts: list[Rollout] = []
        for stream in streams:
            rollouts += self.sampler.switch_stream(stream).sample_student(keys, self.student)
        return [ask_reward(self.task, rollout) for rollout in rollouts]

    def _choose(self, name: str, rollouts: Sequence[Rollout], count: int) -> list[Rollout]:
        """Return `count` of a prompt's answers: its share of failures, and of right ones the clean."""
        batch = self.sampler.batch
        draw = random.Random(seed_of(batch.seed, "resample", batch.step, name))
        right = [rollout for rollout in rollouts if classify_outcome(rollout) == "correct"]
        failures = [rollout for rollout in rollouts if classify_outcome(rollout) != "correct"]
        count_sure, remainder = divmod(len(right) * count, len(rollouts))
        # What is left of the share is one more with its probability: rounding would never keep the
        # one right answer of two, or always.
        chance = random.Random(seed_of(batch.seed, "resample-share", batch.step, name)).random()
        most = count_sure + (chance < remainder / len(rollouts))
        # An answer without replacement: the largest of u^(1/weight) (Efraimidis & Spirakis 2006).
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
    """Return how unclean an answer is: its share of calls without a result, and its form's penalty.

    0 is clean and 2 the most. The form counts where the task asks for one: an answer that is not
    stated, or not between its tags, has 1, another one its repetitions a turn, up to 1.
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


def measure_resampled(rollouts: Sequence[Rollout]) -> Metrics:
    """Return the mean reward of all sampled answers, and the mean penalty of the right ones.

    The answers that are kept are a choice among them. Empty where no source resamples.
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
