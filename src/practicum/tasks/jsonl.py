"""Prompts from JSONL files, one object a line: `{"prompt": "...", "answer": "..."}`.

A row has `prompt` or `messages`, and may have `id`, `answer`, `domain`, `teacher` and `privileged` (an object of texts that
only a teacher sees). Rows that cannot be used are written to `rejected.jsonl` with their number and the reason.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from practicum.errors import DataError
from practicum.ports import Task
from practicum.randomness import seed_of
from practicum.tasks import TaskContext
from practicum.tasks._rows import EXCERPT, Rejected, numbered_lines, read_prompt
from practicum.tasks._verifiers import VERIFIERS
from practicum.types import Message, Prompt


class Config(BaseModel):
    """The files, how held-out prompts are set apart, and how answers are checked."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["jsonl"] = "jsonl"
    path: Path = Field(description="the training rows; a relative path starts at the recipe's folder")
    heldout: Path | float = Field(default=0.1, description="a file of held-out rows, or the share of rows to hold out")
    verifier: Literal["exact", "contains", "number", "math"] = "exact"
    max_rejected: float = Field(default=0.01, ge=0, le=1, description="a larger share of bad rows ends the run")


class Jsonl:
    """Prompts read from files; see `practicum.ports.Task`."""

    def __init__(self, train: Sequence[Prompt], heldout: Sequence[Prompt], verifier: str) -> None:
        self._train, self._heldout = train, heldout
        self._verify = VERIFIERS[verifier]

    def train_prompts(self) -> Sequence[Prompt]:
        """The rows to train on, in the order of the file."""
        return self._train

    def heldout_prompts(self) -> Sequence[Prompt]:
        """The rows held out."""
        return self._heldout

    def reward(self, prompt: Prompt, completion: str) -> float | None:
        """What the verifier says, or None where the row has no answer."""
        return None if prompt.answer is None else self._verify(completion, prompt.answer)


def build(config: Config, context: TaskContext) -> Task:
    """Read the files; DataError when they hold too many bad rows or no good one."""
    if context.rejected_path is not None:
        context.rejected_path.unlink(missing_ok=True)
    train = _read(context.base_dir / config.path, config, context)
    if isinstance(config.heldout, Path):
        held = _read(context.base_dir / config.heldout, config, context)
    else:
        share = config.heldout
        held = [prompt for prompt in train if seed_of(context.seed, "heldout", prompt.id) < share * 2**63]
        chosen = {prompt.id for prompt in held}
        train = [prompt for prompt in train if prompt.id not in chosen]
    questions: set[tuple[Message, ...]] = {prompt.messages for prompt in held}
    rest = [prompt for prompt in train if prompt.messages not in questions]
    if len(rest) < len(train):
        context.say(f"{len(train) - len(rest)} of {len(train)} training rows left out: the same question is held out")
    if not rest:
        raise DataError(f"{context.base_dir / config.path}: every training row is also held out; hold out fewer")
    return Jsonl(rest, held, config.verifier)


def _read(path: Path, config: Config, context: TaskContext) -> list[Prompt]:
    """All good rows of one file; the bad ones go to the rejected file."""
    prompts: dict[str, Prompt] = {}
    bad: list[tuple[int, str]] = []
    for number, line in numbered_lines(path):
        try:
            prompt = read_prompt(line, number)
            if prompt.id in prompts:
                raise Rejected(f"id {prompt.id!r} was used before")
            prompts[prompt.id] = prompt
        except Rejected as reason:
            bad.append((number, str(reason)))
            _write_down(context.rejected_path, path, number, str(reason), line)
    if len(bad) > config.max_rejected * (len(bad) + len(prompts)):
        first = "; ".join(f"row {number}: {reason}" for number, reason in bad[:3])
        raise DataError(
            f"{path}: {len(bad)} of {len(bad) + len(prompts)} rows cannot be used ({first}); mend them, or raise "
            f"task.max_rejected, which is {config.max_rejected:g}"
        )
    if not prompts:
        raise DataError(
            f'{path}: no rows; write one JSON object a line, for example {{"prompt": "...", "answer": "..."}}'
        )
    return list(prompts.values())


def _write_down(rejected: Path | None, path: Path, number: int, reason: str, line: bytes) -> None:
    if rejected is None:
        return
    excerpt = line[:EXCERPT].decode("utf-8", errors="replace")
    with rejected.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"file": str(path), "row": number, "reason": reason, "text": excerpt}) + "\n")
