"""Convert rollouts to rows of rollouts.jsonl and back, for earlier steps and earlier runs."""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import torch
from jaxtyping import Bool, Float, Int, UInt8
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from practicum.errors import CheckpointError, DataError
from practicum.pictures import FIRST_PICTURE
from practicum.text import Renderer
from practicum.types import (
    AUTHORS,
    Author,
    CallOutcome,
    CallRecord,
    Prompt,
    Rollout,
    SearchStep,
    Source,
    StopReason,
    Turn,
)

DIGITS = 9
"""The significant digits that restore a float32 exactly."""

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
PromptTokenId = Annotated[int, Field(ge=0, lt=2 * FIRST_PICTURE)]
Number = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class CallRow(BaseModel):
    """One call of a tool; see `practicum.types.CallRecord`."""

    model_config = ConfigDict(strict=True, frozen=True)
    tool: str
    outcome: CallOutcome


class TurnRow(BaseModel):
    """One turn of a conversation; see `practicum.types.Turn`."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)
    role: str
    tokens: Annotated[int, Field(ge=0)]
    text: str
    calls: list[CallRow] = []
    reward: float | None = None

    def to_turn(self) -> Turn:
        """Return the turn of the row."""
        calls = tuple(CallRecord(call.tool, call.outcome) for call in self.calls)
        return Turn(self.role, self.tokens, self.text, calls, self.reward)


class StepRow(BaseModel):
    """One step of a searched answer; see `practicum.types.SearchStep`."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)
    node: str
    tokens: Annotated[int, Field(ge=1)]
    visits: Annotated[int, Field(ge=0)]
    value: float | None
    reward: float | None = None


class AuthorRow(BaseModel):
    """A run of consecutive tokens with one author."""

    model_config = ConfigDict(strict=True, frozen=True)
    author: Author
    tokens: Annotated[int, Field(ge=1)]


class VersionRow(BaseModel):
    """A run of consecutive tokens of one version of the policy."""

    model_config = ConfigDict(strict=True, frozen=True)
    version: Number
    tokens: Annotated[int, Field(ge=1)]


class RolloutRow(BaseModel):
    """One rollout as a row of rollouts.jsonl, without its reward and the numbers of its update.

    `authors` are runs of consecutive tokens with the same author, in order, and `versions` are runs
    of tokens with the same version of the policy. `authors` is empty if `source` wrote every token,
    and `versions` is empty if a single policy sampled every token.
    """

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)
    step: Number
    prompt: str
    sample: Number
    source: Source
    policy_version: Number
    text: str
    stop_reason: StopReason
    prompt_tokens: list[PromptTokenId]
    tokens: list[PromptTokenId]
    loss_mask: list[bool]
    sampling_logprobs: list[float | None]
    policy_logprobs: list[float | None]
    authors: list[AuthorRow] = []
    turns: list[TurnRow] = []
    notes: dict[str, str] = {}
    steps: list[StepRow] = []
    versions: list[VersionRow] = []
    opens_thoughts: bool = False
    rejected: list[str] = []

    @model_validator(mode="after")
    def _check_lengths(self) -> "RolloutRow":
        # Check everything, because people edit and merge these files.
        columns = (self.tokens, self.loss_mask, self.sampling_logprobs, self.policy_logprobs)
        if len(set(map(len, columns))) > 1:
            raise ValueError(
                "tokens, loss_mask, sampling_logprobs and policy_logprobs differ in length"
            )
        columns_of_runs = {"authors": self.authors, "turns": self.turns, "versions": self.versions}
        for name, parts in columns_of_runs.items():
            count = sum(part.tokens for part in parts)
            if parts and count != len(self.tokens):
                raise ValueError(f"{name} are of {count} tokens, and there are {len(self.tokens)}")
        if sum(step.tokens for step in self.steps) > len(self.tokens):
            raise ValueError(f"steps are of more tokens than there are, {len(self.tokens)}")
        return self

    @classmethod
    def of(cls, step: int, rollout: Rollout) -> "RolloutRow":
        """Return the row of a rollout."""
        return cls(
            step=step,
            prompt=rollout.prompt.id,
            sample=rollout.sample,
            source=rollout.source,
            policy_version=rollout.policy_version,
            text=rollout.text,
            stop_reason=rollout.stop_reason,
            prompt_tokens=list(rollout.prompt_tokens),
            tokens=rollout.tokens.tolist(),
            loss_mask=rollout.loss_mask.tolist(),
            sampling_logprobs=to_exact_floats(rollout.sampling_logprobs),
            policy_logprobs=to_exact_floats(rollout.policy_logprobs),
            authors=_encode_authors(rollout.authors),
            turns=[TurnRow.model_validate(_encode_turn(turn)) for turn in rollout.turns],
            notes=dict(rollout.notes),
            steps=[StepRow.model_validate(asdict(step)) for step in rollout.steps],
            versions=_encode_versions(rollout.versions),
            opens_thoughts=rollout.opens_thoughts,
            rejected=list(rollout.rejected),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON data; authors, turns, notes and steps only if there are any."""
        return self.model_dump(exclude_defaults=True)

    def to_rollout(self, prompt: Prompt) -> Rollout:
        """Return the rollout of the row, without its reward."""
        return Rollout(
            prompt=prompt,
            prompt_tokens=tuple(self.prompt_tokens),
            tokens=torch.tensor(self.tokens, dtype=torch.long),
            loss_mask=torch.tensor(self.loss_mask, dtype=torch.bool),
            sampling_logprobs=from_exact_floats(self.sampling_logprobs),
            policy_logprobs=from_exact_floats(self.policy_logprobs),
            policy_version=self.policy_version,
            stop_reason=self.stop_reason,
            text=self.text,
            sample=self.sample,
            source=self.source,
            authors=_decode_authors(self.authors),
            turns=tuple(turn.to_turn() for turn in self.turns),
            notes=self.notes,
            steps=tuple(SearchStep(**step.model_dump()) for step in self.steps),
            versions=_decode_versions(self.versions),
            opens_thoughts=self.opens_thoughts,
            rejected=tuple(self.rejected),
        )


def _encode_turn(turn: Turn) -> dict[str, Any]:
    """Return a turn as JSON data, with lists instead of tuples, as strict rows require."""
    return {**asdict(turn), "calls": [asdict(call) for call in turn.calls]}


def mark_authors(mask: Bool[Tensor, " T"], inside: Author, outside: Author) -> UInt8[Tensor, " T"]:
    """Return the author of each token as an index in `AUTHORS`: `inside` where the mask is True."""
    return torch.where(mask, AUTHORS.index(inside), AUTHORS.index(outside)).to(torch.uint8)


def _encode_authors(authors: UInt8[Tensor, " T"] | None) -> list[AuthorRow]:
    runs = [] if authors is None else _measure_runs(authors.tolist())
    return [AuthorRow(author=AUTHORS[index], tokens=count) for index, count in runs]


def _measure_runs(values: Sequence[int]) -> list[tuple[int, int]]:
    """Return the runs of equal values, each with its length."""
    return [(value, len(list(run))) for value, run in groupby(values)]


def _encode_versions(versions: Int[Tensor, " T"] | None) -> list[VersionRow]:
    runs = [] if versions is None else _measure_runs(versions.tolist())
    return [VersionRow(version=version, tokens=count) for version, count in runs]


def _decode_versions(rows: Sequence[VersionRow]) -> Int[Tensor, " T"] | None:
    versions = [row.version for row in rows for _ in range(row.tokens)]
    return torch.tensor(versions, dtype=torch.long) if rows else None


def _decode_authors(rows: Sequence[AuthorRow]) -> UInt8[Tensor, " T"] | None:
    indices = [AUTHORS.index(row.author) for row in rows for _ in range(row.tokens)]
    return torch.tensor(indices, dtype=torch.uint8) if rows else None


def to_exact_floats(values: Float[Tensor, " T"]) -> list[float | None]:
    """Return float32 numbers with enough digits to restore them exactly; None if not finite."""
    return [
        float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in values.tolist()
    ]


def from_exact_floats(values: Sequence[float | None]) -> Float[Tensor, " T"]:
    """Return the numbers of `to_exact_floats` as a float32 tensor, NaN for None."""
    numbers = [math.nan if value is None else value for value in values]
    return torch.tensor(numbers, dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class RolloutArchive:
    """The rollouts from before a step.

    `newest` is the replay buffer: the student's newest rollouts of earlier steps. `recorded` holds
    the rollouts of an earlier run, by prompt id.
    """

    newest: deque[Rollout] = field(default_factory=lambda: deque(maxlen=0))
    recorded: Mapping[str, Sequence[Rollout]] = field(default_factory=dict)

    def restore(
        self, rows: Iterable[Mapping[str, Any]], prompts: Sequence[Prompt], step: int
    ) -> None:
        """Restore the replay buffer to its state after a step, from the run's rows up to this step.

        Raises CheckpointError if the rows of that step are missing, or if a row is not a rollout of
        these prompts.
        """
        last = 0
        newest_rows: deque[tuple[int, Mapping[str, Any]]] = deque(maxlen=self.newest.maxlen)
        for number, row in enumerate(rows, start=1):
            try:
                last, source, version = int(row["step"]), row["source"], row["policy_version"]
            except (LookupError, TypeError, ValueError, OverflowError):
                raise _build_error(f"row {number} is not a recorded rollout") from None
            # A replayed rollout has an older version and was in the buffer before, so only
            # completions sampled in their own step enter.
            if source == "student" and version == last - 1:
                newest_rows.append((number, row))
        if last != step:
            raise _build_error(
                f"ends with step {last} instead of {step}, so the completions that step {step + 1} "
                "may replay are lost"
            )
        by_id = {prompt.id: prompt for prompt in prompts}
        self.newest.clear()
        self.newest.extend(_restore_rollout(row, by_id, number) for number, row in newest_rows)


def _restore_rollout(row: Mapping[str, Any], prompts: Mapping[str, Prompt], number: int) -> Rollout:
    try:
        recorded = RolloutRow.model_validate(row)
    except ValidationError:
        raise _build_error(f"row {number} is not a recorded rollout") from None
    if recorded.prompt not in prompts:
        raise _build_error(f"row {number}: no prompt of the run is called {recorded.prompt[:40]!a}")
    return recorded.to_rollout(prompts[recorded.prompt])


def _build_error(why: str) -> CheckpointError:
    return CheckpointError(f"rollouts.jsonl {why}; put the file back, or start a new run")


def load_recorded_rollouts(
    path: Path, prompts: Sequence[Prompt], renderer: Renderer, max_tokens: int
) -> dict[str, list[Rollout]]:
    """Return the rollouts of an earlier run's rollouts.jsonl for these prompts, by prompt id.

    Raises DataError with the number of the row that is not a rollout, is longer than `max_tokens`,
    or answers another prompt of that id.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(
            f"the tape {path} cannot be read ({error.strerror}); give the rollouts.jsonl of a run"
        ) from error
    by_id = {prompt.id: prompt for prompt in prompts}
    recorded: dict[str, list[Rollout]] = {}
    for number, line in enumerate(lines, start=1):
        row = _parse_row(line, f"{path}: row {number}")
        if row.prompt in by_id:
            rollout = row.to_rollout(by_id[row.prompt])
            _check_rollout(rollout, renderer, max_tokens, f"{path}: row {number}")
            recorded.setdefault(row.prompt, []).append(rollout)
    return recorded


def _parse_row(line: bytes, where: str) -> RolloutRow:
    try:
        return RolloutRow.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field_path = ".".join(str(part) for part in first["loc"])
        reason = f"{field_path}: {first['msg']}" if field_path else first["msg"]
        raise DataError(
            f"{where} is not a recorded rollout ({reason}); give an unmodified rollouts.jsonl of a "
            "run"
        ) from error


def _check_rollout(rollout: Rollout, renderer: Renderer, max_tokens: int, where: str) -> None:
    if rollout.prompt_tokens != renderer.render(rollout.prompt.messages):
        raise DataError(
            f"{where} answers a different prompt than the {rollout.prompt.id!r} of this run: its "
            "question, system turn, template or tokenizer differs; use the student that the tape "
            "was recorded with"
        )
    if len(rollout.tokens) > max_tokens:
        raise DataError(
            f"{where} has {len(rollout.tokens)} tokens; raise rollout.max_new_tokens, "
            f"which is {max_tokens}"
        )
