"""The beginnings of an earlier run's conversations as prompts, with what its notes say: no environment (OEL 2603.16856).

Each turn of the student that the file has is a prompt: the conversation before it. What the run
noted stands in the privileged field `experience`, for a teacher that reads it.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, ValidationError

from practicum.core.plugins import Plugin, load_plugin
from practicum.errors import DataError
from practicum.models.config import FinishedStage
from practicum.ports import Task
from practicum.ports.tasks import answers_back
from practicum.statistics import group_pairs
from practicum.tasks import PromptSet, TaskContext
from practicum.tasks._files import HOPELESS_ROW, read_rows
from practicum.types import FrozenConfig, Message, Prompt, Rollout

EXPERIENCE = "experience"
"""The privileged field with the texts of the note."""


class _PlayedTurn(BaseModel):
    role: str
    text: str


class _PlayedRow(BaseModel):
    # A row has more columns, which nobody reads here.
    prompt: str
    turns: list[_PlayedTurn] = []
    notes: dict[str, str] = {}


class Config(FrozenConfig):
    """The earlier run, the task that it played, and the note to keep."""

    type: Literal["played"] = "played"
    run: FinishedStage = Field(
        description="the stage that played, as `{model: {stage: NAME}}`, or the folder of a run"
    )
    task: Plugin("tasks") = Field(  # type: ignore[valid-type]
        description="the task that it played, whose prompts its rows name"
    )
    note: str | None = Field(
        default=None, description="the note whose texts are the privileged field `experience`"
    )
    keep: int | None = Field(
        default=None, ge=1, description="its newest different texts to keep; none: all"
    )
    per: Literal["run", "prompt"] = Field(
        default="run", description="the texts of all conversations, or of those of the same prompt"
    )


def build(config: Config, context: TaskContext) -> Task:
    """Read the rows; DataError with the number of one that is no rollout of the task."""
    played = load_plugin("tasks", config.task.type).build(config.task, context)
    by_id = {prompt.id: prompt for prompt in played.train_prompts()}
    path = _find_rows(context.base_dir / Path(config.run.model).expanduser())
    rows = list(_read_rows(path))
    texts = group_pairs(
        (row.prompt if config.per == "prompt" else "", row.notes.get(config.note or "", ""))
        for _, row in rows
    )
    experiences = {key: _join_newest(group, config.keep) for key, group in texts.items()}
    prompts: dict[str, Prompt] = {}
    for number, row in rows:
        if row.prompt not in by_id:
            raise DataError(
                f"{path}: row {number}: no prompt of task.task is called {row.prompt[:40]!a}; "
                "give the task that the run played"
            )
        experience = experiences[row.prompt if config.per == "prompt" else ""]
        for prompt in _list_beginnings(by_id[row.prompt], row.turns, experience):
            prompts.setdefault(prompt.id, prompt)
    if not prompts:
        raise DataError(f"{path}: no rows; give the rollouts.jsonl of a run that has ended")
    train = list(prompts.values())
    if answers_back(played):
        # A conversation has a reward at its end alone, and nobody is left to hold it to its end.
        return PromptSet(train=train, heldout=[], grade=lambda reply, prompt: None)
    return PromptSet(
        train=train,
        heldout=played.heldout_prompts(),
        grade=lambda reply, prompt: played.reward(Rollout.from_text(prompt, reply)),
    )


def _join_newest(texts: Sequence[str], keep: int | None) -> str:
    """Return the newest different texts, a line each."""
    # A text that was noted again counts as new, and is kept once.
    newest = [text for text in dict.fromkeys(text.strip() for text in reversed(texts)) if text]
    return "\n".join(reversed(newest[:keep]))


def _find_rows(folder: Path) -> Path:
    """Return the rows of a run by its folder, or by that of the student that it made."""
    name = "rollouts.jsonl"
    return folder / name if (folder / name).is_file() else folder.parent / name


def _read_rows(path: Path) -> Iterator[tuple[int, _PlayedRow]]:
    """Yield the numbered rows of the file, with their prompts, turns and notes."""
    if not path.is_file():
        raise DataError(f"{path} cannot be read (no file); give the rollouts.jsonl of a run")
    for row in read_rows(path, HOPELESS_ROW):
        try:
            content = _PlayedRow.model_validate(row.columns)
        except ValidationError:
            raise DataError(
                f"{path}: row {row.number} is no rollout; give the rollouts.jsonl of a run as it was "
                "written"
            ) from None
        yield row.number, content


def _list_beginnings(
    prompt: Prompt, turns: Sequence[_PlayedTurn], experience: str
) -> Iterator[Prompt]:
    """Yield a prompt for each turn of the student: the conversation before it."""
    privileged = {**prompt.privileged, EXPERIENCE: experience} if experience else prompt.privileged
    messages = list(prompt.messages)
    for number, turn in enumerate(turns or [_PlayedTurn(role="assistant", text="")]):
        if turn.role == "assistant":
            # Equal beginnings are one prompt, whoever played them.
            conversation = json.dumps([message.content for message in messages], ensure_ascii=False)
            name = f"{prompt.id}@{number}:{conversation}" if number else prompt.id
            yield Prompt(name, tuple(messages), prompt.answer, privileged=privileged)
        messages.append(Message(turn.role, turn.text))
