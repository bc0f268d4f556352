"""Rollouts as rows of rollouts.jsonl, and back: what an earlier step or an earlier run wrote, token for token."""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import torch
from jaxtyping import Float, UInt8
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from practicum.errors import CheckpointError, DataError
from practicum.text import Renderer
from practicum.types import AUTHORS, Author, Prompt, Rollout, Source, StopReason, Turn

DIGITS = 9
"""So many significant digits bring a float32 back exactly."""

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Number = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class TurnRow(BaseModel):
    """One turn of a conversation; see `practicum.types.Turn`."""

    model_config = ConfigDict(strict=True, frozen=True)
    role: str
    tokens: Annotated[int, Field(ge=0)]
    text: str


class AuthorRow(BaseModel):
    """Who wrote some tokens one after another."""

    model_config = ConfigDict(strict=True, frozen=True)
    author: Author
    tokens: Annotated[int, Field(ge=1)]


class RolloutRow(BaseModel):
    """One rollout as rollouts.jsonl holds it, beside what was found out about it later.

    `authors` are the writers of its tokens one after another, each with the number of its tokens; a rollout that `source` wrote
    alone has none.
    """

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)
    step: Number
    prompt: str
    sample: Number
    source: Source
    policy_version: Number
    text: str
    stop_reason: StopReason
    prompt_tokens: list[TokenId]
    tokens: list[TokenId]
    loss_mask: list[bool]
    sampling_logprobs: list[float | None]
    policy_logprobs: list[float | None]
    authors: list[AuthorRow] = []
    turns: list[TurnRow] = []
    notes: dict[str, str] = {}

    @model_validator(mode="after")
    def _of_one_length(self) -> "RolloutRow":
        columns = (self.tokens, self.loss_mask, self.sampling_logprobs, self.policy_logprobs)
        if len(set(map(len, columns))) > 1:
            raise ValueError(
                "tokens, loss_mask, sampling_logprobs and policy_logprobs differ in length"
            )
        for name, parts in (("authors", self.authors), ("turns", self.turns)):
            count = sum(part.tokens for part in parts)
            if parts and count != len(self.tokens):
                raise ValueError(f"{name} are of {count} tokens, and there are {len(self.tokens)}")
        return self

    @classmethod
    def of(cls, step: int, rollout: Rollout) -> "RolloutRow":
        """The row of a rollout."""
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
            turns=[
                TurnRow(role=turn.role, tokens=turn.tokens, text=turn.text)
                for turn in rollout.turns
            ],
            notes=dict(rollout.notes),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON data; authors, turns and notes where there are any."""
        return self.model_dump(exclude_defaults=True)

    def rollout(self, prompt: Prompt) -> Rollout:
        """The rollout of the row, as it was before it had a reward."""
        rollout = Rollout(
            prompt=prompt,
            prompt_tokens=tuple(self.prompt_tokens),
            tokens=torch.tensor(self.tokens, dtype=torch.long),
            loss_mask=torch.tensor(self.loss_mask, dtype=torch.bool),
            sampling_logprobs=_undigits(self.sampling_logprobs),
            policy_logprobs=_undigits(self.policy_logprobs),
            policy_version=self.policy_version,
            stop_reason=self.stop_reason,
            text=self.text,
            sample=self.sample,
            source=self.source,
            authors=_decode_authors(self.authors),
            turns=tuple(Turn(turn.role, turn.tokens, turn.text) for turn in self.turns),
            notes=self.notes,
        )
        return rollout if self.turns else _restore_turns(rollout)


def _restore_turns(rollout: Rollout) -> Rollout:
    """Return the rollout with the turns and authors of its conversation, where its row is from before rows had them.

    Such a row shows a conversation by its mask, which is True for each turn of the student and False between them, and by its
    text, which has a line for each of those turns. What the environment said is in the tokens alone: its turns have no text.
    """
    runs = [(spoken, len(list(run))) for spoken, run in groupby(rollout.loss_mask.tolist())]
    lines = rollout.text.split("\n")
    if (
        len(runs) == 1
        or not (runs and runs[0][0] and runs[-1][0])
        or len(runs) != 2 * len(lines) - 1
    ):
        return rollout
    turns = [
        Turn("assistant", count, lines[place // 2]) if spoken else Turn("user", count, "")
        for place, (spoken, count) in enumerate(runs)
    ]
    source, environment = (
        torch.tensor(AUTHORS.index(author), dtype=torch.uint8)
        for author in (rollout.source, "environment")
    )
    return replace(
        rollout, turns=tuple(turns), authors=torch.where(rollout.loss_mask, source, environment)
    )


def _encode_authors(authors: UInt8[Tensor, " T"] | None) -> list[AuthorRow]:
    runs = [] if authors is None else groupby(authors.tolist())
    return [AuthorRow(author=AUTHORS[place], tokens=len(list(run))) for place, run in runs]


def _decode_authors(rows: Sequence[AuthorRow]) -> UInt8[Tensor, " T"] | None:
    places = [AUTHORS.index(row.author) for row in rows for _ in range(row.tokens)]
    return torch.tensor(places, dtype=torch.uint8) if rows else None


def to_exact_floats(values: Float[Tensor, " T"]) -> list[float | None]:
    """The numbers with all that a float32 holds; None where a token has none."""
    return [
        float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in values.tolist()
    ]


def _undigits(values: Sequence[float | None]) -> Float[Tensor, " T"]:
    return torch.tensor(
        [math.nan if value is None else value for value in values], dtype=torch.float32
    )


@dataclass(frozen=True, slots=True)
class RolloutArchive:
    """What was written before a step: the `newest` student rollouts of earlier steps, and an earlier run's, by prompt."""

    newest: deque[Rollout] = field(default_factory=lambda: deque(maxlen=0))
    tape: Mapping[str, Sequence[Rollout]] = field(default_factory=dict)

    def restore(
        self, rows: Iterable[Mapping[str, Any]], prompts: Sequence[Prompt], step: int
    ) -> None:
        """Hold the newest rollouts as they were at the end of a step, from all rows that the run has written until then.

        Raises CheckpointError where the rows of that step are gone, or a row is no rollout of these prompts.
        """
        last = 0
        fresh: deque[tuple[int, Mapping[str, Any]]] = deque(maxlen=self.newest.maxlen)
        for number, row in enumerate(rows, start=1):
            try:
                last, source, version = int(row["step"]), row["source"], row["policy_version"]
            except (LookupError, TypeError, ValueError, OverflowError):
                raise _lost(f"row {number} is not a recorded rollout") from None
            if source == "student" and version == last - 1:
                fresh.append((number, row))
        if last != step:
            raise _lost(
                f"ends with step {last} instead of {step}, so the completions that step {step + 1} may replay are lost"
            )
        by_id = {prompt.id: prompt for prompt in prompts}
        self.newest.clear()
        self.newest.extend(_restored(row, by_id, number) for number, row in fresh)


def _restored(row: Mapping[str, Any], prompts: Mapping[str, Prompt], number: int) -> Rollout:
    try:
        recorded = RolloutRow.model_validate(row)
    except ValidationError:
        raise _lost(f"row {number} is not a recorded rollout") from None
    if recorded.prompt not in prompts:
        raise _lost(f"row {number}: no prompt of the run is called {recorded.prompt[:40]!a}")
    return recorded.rollout(prompts[recorded.prompt])


def _lost(why: str) -> CheckpointError:
    return CheckpointError(f"rollouts.jsonl {why}; put the file back, or start a new run")


def load_recorded_rollouts(
    path: Path, prompts: Sequence[Prompt], renderer: Renderer, longest: int
) -> dict[str, list[Rollout]]:
    """The rollouts of an earlier run's rollouts.jsonl for these prompts, by prompt.

    Raises DataError with the row that is no rollout, is longer than `longest`, or answers another prompt of that name.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(
            f"the tape {path} cannot be read ({error.strerror}); give the rollouts.jsonl of a run"
        ) from error
    by_id = {prompt.id: prompt for prompt in prompts}
    found: dict[str, list[Rollout]] = {}
    for number, line in enumerate(lines, start=1):
        row = _row(line, f"{path}: row {number}")
        if row.prompt in by_id:
            rollout = row.rollout(by_id[row.prompt])
            _check(rollout, renderer, longest, f"{path}: row {number}")
            found.setdefault(row.prompt, []).append(rollout)
    return found


def _row(line: bytes, where: str) -> RolloutRow:
    try:
        return RolloutRow.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DataError(
            f"{where} is not a recorded rollout ({f'{place}: ' if place else ''}{first['msg']}); give the rollouts.jsonl of a run "
            "as it was written"
        ) from error


def _check(rollout: Rollout, renderer: Renderer, longest: int, where: str) -> None:
    if rollout.prompt_tokens != renderer.render(rollout.prompt.messages):
        raise DataError(
            f"{where} answers another prompt than {rollout.prompt.id!r} is here: its question, system turn, template or "
            "tokenizer differs; a tape is replayed by the student that it was recorded for"
        )
    if len(rollout.tokens) > longest:
        raise DataError(
            f"{where} has {len(rollout.tokens)} tokens; raise rollout.max_new_tokens, which is {longest}"
        )
