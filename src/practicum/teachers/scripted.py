"""Replay a tape of scores, for tests, as a cache of an earlier run, or for a bug report.

A tape is the `rollouts.jsonl` of any run folder: rows with `prompt_tokens`, `tokens` and
`teacher_logprobs`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field, model_validator

from practicum.errors import DataError, TeacherError
from practicum.models.config import FinishedStage
from practicum.objective import Signal
from practicum.ports import (
    Capabilities,
    Teacher,
    TeacherConfig,
    TeacherContext,
)
from practicum.types import Rollout, TeacherSignal

Key = tuple[str, tuple[int, ...]]

TAPE_CAPABILITIES = Capabilities(
    signals=frozenset({"sampled"}), writes=False, follows_student=False
)
"""The capabilities of a tape: one log-probability per token."""


class Config(TeacherConfig):
    """The tape to replay."""

    type: Literal["scripted"] = "scripted"
    tape: Path | None = Field(default=None, description="a rollouts.jsonl with teacher_logprobs")
    run: FinishedStage | None = Field(
        default=None,
        description="the stage that recorded one, as `{model: {stage: NAME}}`, instead",
    )

    @model_validator(mode="after")
    def _check_tape(self) -> "Config":
        if (self.tape is None) == (self.run is None):
            raise ValueError("give either tape, a rollouts.jsonl, or run, an earlier stage")
        return self

    def capabilities(self) -> Capabilities:
        """Return the sampled token's signal: a tape holds one log-probability per token."""
        return TAPE_CAPABILITIES


class ScriptedTeacher(Teacher):
    """A teacher that answers only from the tape; see `practicum.ports.Teacher`."""

    def __init__(
        self, scores: Mapping[Key, Sequence[float]], tape: Path, heldout: frozenset[str]
    ) -> None:
        self._scores = scores
        self._tape = tape
        self._heldout = heldout

    @property
    def capabilities(self) -> Capabilities:
        """One log-probability per token."""
        return TAPE_CAPABILITIES

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """Return the recorded log-probabilities, and no scores for held-out prompts.

        Raises TeacherError if the tape lacks the tokens of another prompt.
        """
        return [self._look_up(rollout) for rollout in rollouts]

    def _look_up(self, rollout: Rollout) -> TeacherSignal:
        scores = self._scores.get((rollout.prompt.id, tuple(rollout.tokens.tolist())))
        if scores is not None:
            return TeacherSignal(logprobs=torch.tensor(scores, dtype=torch.float32))
        if rollout.prompt.id in self._heldout:
            return TeacherSignal()
        raise TeacherError(
            f"the tape {self._tape} has no scores for this completion of prompt "
            f"{rollout.prompt.id!r}; a tape only replays the run it was recorded from, with "
            "the same seed, versions and threads"
        )


def build(config: Config, context: TeacherContext) -> Teacher:
    """Read the whole tape; DataError with the row that is not a recorded rollout."""
    base = context.base_dir
    tape = config.run.find_rollouts(base) if config.run else base / str(config.tape)
    try:
        lines = tape.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(
            f"the tape {tape} cannot be read ({error.strerror}); give the rollouts.jsonl of a run"
        ) from error
    except UnicodeDecodeError as error:
        row = error.object.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{tape}: row {row} is not UTF-8; give the unmodified rollouts.jsonl of a run"
        ) from error
    context.register_file(tape)
    rows = [_parse_row(line, f"{tape}: row {row}") for row, line in enumerate(lines, start=1)]
    if not rows:
        raise DataError(f"{tape}: no rows; give the rollouts.jsonl of a run that has ended")
    heldout = context.task.heldout_prompts() if context.task else ()
    return ScriptedTeacher(dict(rows), tape, frozenset(prompt.id for prompt in heldout))


def _parse_row(line: str, where: str) -> tuple[Key, list[float]]:
    """Return the key and log-probabilities of a row; DataError if it is not a recorded rollout."""
    try:
        row = json.loads(line)
        prompt, tokens, logprobs = str(row["prompt"]), row["tokens"], row["teacher_logprobs"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"{where} is not a recorded rollout ({error!r}); give the unmodified rollouts.jsonl of "
            "a run"
        ) from error
    # `type` and not `isinstance`: True is an int in Python and no token id.
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise DataError(
            f"{where} has no list of token ids under 'tokens'; give the rollouts.jsonl of a run"
        )
    if isinstance(logprobs, list) and len(logprobs) == len(tokens):
        mask = row.get("loss_mask") or [True] * len(tokens)
        # Tokens that the student did not write, such as an environment's, have no score.
        pairs = zip(logprobs, mask, strict=False)
        logprobs = [logprob if is_trained else 0.0 for logprob, is_trained in pairs]
        if len(logprobs) == len(tokens) and all(map(_is_number, logprobs)):
            return (prompt, tuple(tokens)), [float(value) for value in logprobs]
    raise DataError(
        f"{where} has no teacher log-probability for each of its {len(tokens)} tokens; record "
        "the tape with a teacher that scores every token"
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
