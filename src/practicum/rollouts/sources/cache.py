"""Completions of an earlier run."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from practicum.core.plugins import list_packaged, load_plugin
from practicum.errors import DataError
from practicum.rollouts.batch import RolloutKey, shuffle_indices
from practicum.rollouts.source import SOURCES, SourceConfig, SourceParts, Tape, check_path
from practicum.rollouts.tape import load_recorded_rollouts
from practicum.text import Renderer
from practicum.types import Metrics, Prompt, Rollout


class RecordedSource(SourceConfig):
    """The base of all sources that take recorded completions from a file."""

    path: str = Field(min_length=1)

    @field_validator("path")
    @classmethod
    def _refuse_ambiguous_path(cls, path: str) -> str:
        return check_path(path)

    @property
    def environment_writes(self) -> bool:
        """Return True: the recorded rollouts may contain an environment's turns."""
        return True

    @classmethod
    def measure(cls, rollouts: Sequence[Rollout]) -> Metrics:
        """Return the metrics of the sources that wrote the recorded rollouts."""
        metrics: Metrics = {}
        for name in sorted(list_packaged(SOURCES)):
            source = load_plugin(SOURCES, name).Config
            if not issubclass(source, RecordedSource):
                metrics |= source.measure(rollouts)
        return metrics

    def collect(self, keys: Sequence[RolloutKey], parts: SourceParts) -> list[Rollout]:
        """Return a recorded completion for each key."""
        return [recall(key, parts) for key in keys]


class Config(RecordedSource):
    """Completions of an earlier rollouts.jsonl, token for token (Lightning OPD 2604.13010)."""

    type: Literal["cache"] = "cache"

    def load_tape(
        self, folder: Path, prompts: Sequence[Prompt], renderer: Renderer, max_tokens: int
    ) -> Tape:
        """Return the rollouts of the file."""
        file = folder / self.path
        return Tape(file, load_recorded_rollouts(file, prompts, renderer, max_tokens))


def recall(key: RolloutKey, parts: SourceParts) -> Rollout:
    """Return a recorded completion of the key's prompt, in an order that differs per step."""
    batch = parts.sampler.batch
    recorded = parts.writers.archive.recorded.get(key.prompt.id, ())
    if len(recorded) < batch.n:
        raise DataError(
            f"the tape of rollout.source holds {len(recorded)} completions of prompt "
            f"{key.prompt.id!r}, and rollout.n asks for {batch.n}; record more with a run over "
            "the same prompts, or ask for fewer"
        )
    order = shuffle_indices(len(recorded), batch.seed, "cache", batch.step, key.prompt.id)
    return replace(recorded[order[key.number % len(order)]], sample=key.number, policy_version=0)
