"""Completions of an earlier run."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from practicum.core.plugins import list_packaged, load_plugin
from practicum.errors import DataError
from practicum.models.config import FinishedStage
from practicum.rollouts.batch import RolloutKey, shuffle_indices
from practicum.rollouts.source import SOURCES, SourceConfig, SourceParts, Tape, check_path
from practicum.rollouts.tape import load_recorded_rollouts
from practicum.text import Renderer
from practicum.types import Metrics, Prompt, Rollout

RecordedPath = Annotated[str, Field(min_length=1), AfterValidator(check_path)]
"""The path of a file of recorded completions."""


class RecordedSource(SourceConfig):
    """The base of all sources that take recorded completions from a file."""

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
    """Completions of an earlier rollouts.jsonl, token for token (Lightning OPD 2604.13010).

    `run` is the stage that wrote them, as `{model: {stage: NAME}}`, instead of a path.
    """

    type: Literal["cache"] = "cache"
    path: RecordedPath | None = None
    run: FinishedStage | None = None

    @model_validator(mode="after")
    def _check_file(self) -> "Config":
        if (self.path is None) == (self.run is None):
            raise ValueError("give either path, a rollouts.jsonl, or run, an earlier stage")
        return self

    def load_tape(
        self, folder: Path, prompts: Sequence[Prompt], renderer: Renderer, max_tokens: int
    ) -> Tape:
        """Return the rollouts of the file."""
        file = self.run.find_rollouts(folder) if self.run else folder / str(self.path)
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
