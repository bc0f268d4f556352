"""Prompts from the prefixes of an earlier run's conversations, without an environment (OEL 2603.16856).

Each student turn in the file gives one prompt: the conversation before the turn, in the stored
tokens. The run's notes are in the privileged field `experience`, for a teacher that reads it.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from practicum.core.plugins import Plugin, build_part
from practicum.errors import DataError
from practicum.models.config import FinishedStage
from practicum.ports import Task, TaskConfig, TaskContext
from practicum.ports.gate import check_prompts
from practicum.rows import PromptSet
from practicum.rows.row_files import HOPELESS_ROW, read_rows
from practicum.statistics import group_pairs
from practicum.text.stored import add_tokens
from practicum.text.trace_rows import TokenId
from practicum.types import Prompt, Rollout, Turn

EXPERIENCE = "experience"
"""The privileged field with the texts of the note."""


def _check_unicode(text: str) -> str:
    """Return the text; ValueError if it holds half of a surrogate pair."""
    text.encode()
    return text


_Text = Annotated[str, AfterValidator(_check_unicode)]


class _PlayedTurn(BaseModel):
    role: _Text
    text: _Text
    tokens: int = Field(default=0, ge=0)


class _PlayedRow(BaseModel):
    # A row has more columns, which are not read here.
    prompt: str
    prompt_tokens: list[TokenId] = []
    tokens: list[TokenId] = []
    turns: list[_PlayedTurn] = []
    notes: dict[str, _Text] = {}

    @model_validator(mode="after")
    def _check_lengths(self) -> "_PlayedRow":
        # An answer outside a conversation has no turns; rows of other programs may have no tokens.
        if self.turns and self.tokens and sum(t.tokens for t in self.turns) != len(self.tokens):
            raise ValueError("the token counts of its turns do not add up to the row's tokens")
        return self

    def list_turns(self) -> list[Turn]:
        """Return the turns; an answer outside a conversation is one student turn."""
        turns = [Turn(turn.role, turn.tokens, turn.text) for turn in self.turns]
        return turns or [Turn("assistant", len(self.tokens), "")]


class Config(TaskConfig):
    """The earlier run, the task that it played, and the note to keep."""

    type: Literal["played"] = "played"
    run: FinishedStage = Field(
        description="the stage that played, as `{model: {stage: NAME}}`, or the folder of a run"
    )
    task: Plugin("tasks", TaskConfig) = Field(  # type: ignore[valid-type]
        description="the task that the run played; its prompts are named in the rows"
    )
    note: str | None = Field(
        default=None, description="the note for the privileged field `experience`"
    )
    keep: int | None = Field(
        default=None, ge=1, description="number of its newest distinct texts to keep; none: all"
    )
    scope: Literal["run", "prompt"] = Field(
        default="run", description="the texts of all conversations, or of the same prompt only"
    )


def build(config: Config, context: TaskContext) -> Task:
    """Read the rows; DataError with the number of a row that is not a rollout of the task."""
    played = build_part("tasks", Task, config.task, context)
    by_id = {prompt.id: prompt for prompt in check_prompts(played.train_prompts())}
    path = config.run.find_rollouts(context.base_dir)
    rows = list(_read_rows(path))
    texts = group_pairs(
        (row.prompt if config.scope == "prompt" else "", row.notes.get(config.note or "", ""))
        for _, row in rows
    )
    experiences = {key: _join_newest(group, config.keep) for key, group in texts.items()}
    train: list[Prompt] = []
    spellings: dict[str, set[tuple[tuple[int, ...], ...]]] = {}
    for number, row in rows:
        if row.prompt not in by_id:
            raise DataError(
                f"{path}: row {number}: no prompt of task.task is called {row.prompt[:40]!a}; "
                "give the task that the run played"
            )
        experience = experiences[row.prompt if config.scope == "prompt" else ""]
        opening = by_id[row.prompt]
        for prompt in _list_beginnings(opening, row, experience):
            # Equal prefixes are one prompt, even from different conversations.
            spelling = tuple(turn.tokens for turn in prompt.messages[len(opening.messages) :])
            same = spellings.setdefault(prompt.id, set())
            if spelling not in same:
                same.add(spelling)
                name = f"{prompt.id}#{len(same)}" if len(same) > 1 else prompt.id
                train.append(replace(prompt, id=name))
    if not train:
        raise DataError(f"{path}: no rows; give the rollouts.jsonl of a run that has ended")
    if played.converses:
        # A conversation only has a reward at its end, and no environment exists to continue it.
        return PromptSet(train=train, heldout=[], grade=lambda reply, prompt: None)
    return PromptSet(
        train=train,
        heldout=played.heldout_prompts(),
        grade=lambda reply, prompt: played.reward(Rollout.from_text(prompt, reply)),
    )


def _join_newest(texts: Sequence[str], keep: int | None) -> str:
    """Return the newest distinct texts, one per line."""
    # A text that was noted again counts as new, and is kept once.
    newest = [text for text in dict.fromkeys(text.strip() for text in reversed(texts)) if text]
    return "\n".join(reversed(newest[:keep]))


def _read_rows(path: Path) -> Iterator[tuple[int, _PlayedRow]]:
    """Yield the numbered rows of the file, with their prompts, turns and notes."""
    if not path.is_file():
        raise DataError(f"{path} cannot be read (no file); give the rollouts.jsonl of a run")
    for row in read_rows(path, HOPELESS_ROW):
        try:
            content = _PlayedRow.model_validate(row.columns)
        except ValidationError:
            raise DataError(
                f"{path}: row {row.number} is not a rollout; give the unmodified rollouts.jsonl of a "
                "run"
            ) from None
        yield row.number, content


def _list_beginnings(prompt: Prompt, row: _PlayedRow, experience: str) -> Iterator[Prompt]:
    """Yield a prompt for each turn of the student: the conversation before it, with its tokens."""
    privileged = {**prompt.privileged, EXPERIENCE: experience} if experience else prompt.privileged
    turns = row.list_turns()
    stored = add_tokens(prompt.messages, row.prompt_tokens, turns, row.tokens)
    for number, turn in enumerate(turns):
        if turn.role == "assistant":
            messages = stored[: len(prompt.messages) + number]
            conversation = json.dumps([message.content for message in messages], ensure_ascii=False)
            name = f"{prompt.id}@{number}:{conversation}" if number else prompt.id
            yield Prompt(name, messages, prompt.answer, privileged=privileged)
