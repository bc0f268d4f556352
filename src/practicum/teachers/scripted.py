"""Replays a tape of scores: the mock of the tests, a cache of an earlier run, and the attachment of a bug report.

A tape is the `rollouts.jsonl` of any run folder: rows with `prompt_tokens`, `tokens` and `teacher_logprobs`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from practicum.errors import DataError, TeacherError
from practicum.objective import Signal
from practicum.ports import Capabilities, Teacher, TeacherContext, TeacherRequest
from practicum.types import Rollout, Sample, SamplingParams, TeacherSignal

Key = tuple[str, tuple[int, ...]]


class Config(BaseModel):
    """The tape to replay."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["scripted"] = "scripted"
    tape: Path = Field(description="a rollouts.jsonl with teacher_logprobs")

    def capabilities(self) -> Capabilities:
        """A tape holds one log-probability a token."""
        return Capabilities(signals=frozenset({"sampled"}))


class ScriptedTeacher:
    """Answers from the tape, and only from it; see `practicum.ports.Teacher`."""

    def __init__(self, scores: Mapping[Key, Sequence[float]], tape: Path) -> None:
        self._scores = scores
        self._tape = tape

    @property
    def capabilities(self) -> Capabilities:
        """One log-probability a token."""
        return Capabilities(signals=frozenset({"sampled"}))

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """The recorded log-probabilities; TeacherError where the tape has none for these very tokens."""
        return [
            TeacherSignal(logprobs=torch.tensor(self._recorded(rollout), dtype=torch.float32)) for rollout in rollouts
        ]

    def sample(self, requests: Sequence[TeacherRequest], params: SamplingParams) -> list[Sample] | None:
        """A tape cannot answer."""
        return None

    def after_step(self, step: int) -> None:
        """A tape does not change."""

    def save_state(self) -> dict[str, Tensor]:
        """Nothing to save."""
        return {}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Nothing was saved."""

    def _recorded(self, rollout: Rollout) -> Sequence[float]:
        key = (rollout.prompt.id, tuple(rollout.tokens.tolist()))
        if key not in self._scores:
            raise TeacherError(
                f"the tape {self._tape} has no scores for this completion of prompt {rollout.prompt.id!r}; a tape only "
                "replays the run it was recorded from, with the same seed, versions and threads"
            )
        return self._scores[key]


def build(config: Config, context: TeacherContext) -> Teacher:
    """Read the whole tape; DataError naming the row that is not one."""
    scores: dict[Key, Sequence[float]] = {}
    try:
        lines = config.tape.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(
            f"the tape {config.tape} cannot be read ({error.strerror}); give the rollouts.jsonl of a run"
        ) from error
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            tokens, logprobs = tuple(row["tokens"]), row["teacher_logprobs"]
            key = (str(row["prompt"]), tokens)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise DataError(f"{config.tape}: row {number} is not a recorded rollout ({error!r})") from error
        if logprobs is None or len(logprobs) != len(tokens):
            raise DataError(
                f"{config.tape}: row {number} has no teacher log-probability for each of its {len(tokens)} tokens"
            )
        scores[key] = logprobs
    return ScriptedTeacher(scores, config.tape)
