"""Choose at random between the student and another writer for each completion."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field

from practicum.rollouts.batch import RolloutKey, call_by_group
from practicum.rollouts.sampling import compute_key_seed
from practicum.rollouts.source import OtherWriter, SourceConfig, SourceParts
from practicum.types import Rollout


class Config(SourceConfig):
    """Sample the student with probability `student`, otherwise use `other` (GKD 2306.13649).

    `other: replay` takes one of the newest student completions of earlier steps, of any prompt. The
    student writes as long as the replay buffer is empty. `replay` is the share of the student's
    completions that are taken from a full replay buffer (DistiLLM 2402.03898).
    """

    type: Literal["mix"] = "mix"
    student: float = Field(default=0.5, ge=0, le=1)
    other: Literal["dataset", "teacher", "replay"] = "dataset"
    replay: float | None = Field(default=None, ge=0, le=1)

    @property
    def other_writers(self) -> tuple[OtherWriter, ...]:
        """Return the writer named in `other`; empty for a replay, which the student wrote."""
        return () if self.other == "replay" else (self.other,)

    @property
    def replays(self) -> bool:
        """Return True if the student's completions of earlier steps can be replayed."""
        return self.other == "replay" or self.replay is not None

    def count_teacher_answers(self, n: int) -> float:
        """Return the teacher's share."""
        return n * (1 - self.student) if self.other == "teacher" else 0

    def collect(self, keys: Sequence[RolloutKey], parts: SourceParts) -> list[Rollout]:
        """Return each completion from its writer, and add the student's to the archive."""
        writers = [self._choose_writer(key, parts) for key in keys]

        def fill(rows: list[int]) -> list[Rollout]:
            group = [keys[row] for row in rows]
            if writers[rows[0]] == "replay":
                return replay(group, parts)
            return parts.sample_writer(writers[rows[0]], group, self)

        # Each writer fills all of its keys in one call, so that sampling is batched. Every key has
        # a separate random stream, so the grouping does not change the samples.
        rollouts = call_by_group(writers, fill)
        # Drop the states: a resumed run restores the buffer from stored rows, which have no states.
        parts.writers.archive.newest.extend(
            replace(rollout, states=None)
            for rollout, writer in zip(rollouts, writers, strict=True)
            if writer == "student"
        )
        return rollouts

    def _choose_writer(self, key: RolloutKey, parts: SourceParts) -> str:
        """Choose the writer of a completion; the student while the replay buffer is empty."""
        # Seeds are uniform below 2**63, so the seed itself is the random number.
        seed = compute_key_seed(parts.sampler.batch, "mix", key)
        newest = parts.writers.archive.newest
        if seed < self.student * 2**63:
            is_fresh = seed < self.student * (1 - (self.replay or 0.0)) * 2**63
            return "student" if is_fresh or len(newest) < (newest.maxlen or 1) else "replay"
        return "student" if self.other == "replay" and not newest else self.other


def replay(keys: Sequence[RolloutKey], parts: SourceParts) -> list[Rollout]:
    """Return old rollouts of any prompt, numbered after that prompt's keys in this batch."""
    batch, newest = parts.sampler.batch, parts.writers.archive.newest
    # The number distinguishes the completions of a prompt, so an old rollout needs a new number.
    counts: Counter[str] = Counter()
    for prompt in batch.prompts:
        counts[prompt.id] += batch.n
    rollouts = []
    for key in keys:
        replayed = newest[compute_key_seed(batch, "replay", key) % len(newest)]
        rollouts.append(replace(replayed, sample=counts[replayed.prompt.id]))
        counts[replayed.prompt.id] += 1
    return rollouts
