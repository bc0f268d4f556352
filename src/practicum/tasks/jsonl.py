"""Prompts from JSONL files, one object a line: `{"prompt": "...", "answer": "..."}`.

A row has `prompt` or `messages`, and may have `id`, `answer`, `response` (a full worked answer),
`domain`, `teacher` and `privileged` (an object of texts for a teacher only). Rows that cannot be
used are written to `rejected.jsonl` with their number and the reason.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from practicum.core.randomness import seed_of
from practicum.errors import DataError
from practicum.ports import Task
from practicum.tasks import PromptSet, TaskContext
from practicum.tasks._deadline import OwnWalls
from practicum.tasks._grading import RewardRange, Verifier, name_function, open_grader
from practicum.tasks._rows import HOPELESS_ROW, Rejected, read_lines, read_prompt
from practicum.tasks._verifiers import PACKAGES, find_last_number
from practicum.types import FrozenConfig, Prompt

log = logging.getLogger(__name__)

EXCERPT = 120
SHOWN = 3
Count = Annotated[int, Field(strict=True, ge=0)]
Share = Annotated[float, Field(strict=True, ge=0, lt=1)]


class Config(FrozenConfig):
    """The files, the choice of held-out prompts, and the verifier."""

    type: Literal["jsonl"] = "jsonl"
    path: Path = Field(
        description="the training rows; a relative path starts at the recipe's folder"
    )
    heldout: Count | Share | Path = Field(
        default=0.1,
        description="the number or share of rows to hold out, or a file of held-out rows",
    )
    verifier: Verifier = Field(
        default="exact", description="a name, or a function of yours as `package.module:function`"
    )
    reward_range: RewardRange = Field(
        default=(0.0, 1.0), description="the least and largest number that your function returns"
    )
    sandbox: OwnWalls = Field(
        default="require",
        description="a missing wall around the verifier: refuse, do without it; `off`: no walls",
    )
    max_rejected: float = Field(
        default=0.01, ge=0, le=1, description="a larger share of bad rows ends the run"
    )
    max_row_bytes: int = Field(
        default=1 << 20, ge=1, le=HOPELESS_ROW, description="longer rows are rejected"
    )


def build(config: Config, context: TaskContext) -> Task:
    """Read the files; DataError if too many rows are bad or none is good."""
    grade = open_grader(config.verifier, config.sandbox, config.reward_range)
    context.packages.extend(PACKAGES.get(name_function(config.verifier), ()))
    if context.rejected_path is not None:
        context.rejected_path.unlink(missing_ok=True)
    path = context.base_dir / config.path
    train = _read(path, "train", config, context)
    if isinstance(config.heldout, Path):
        heldout = _read(context.base_dir / config.heldout, "heldout", config, context)
    else:
        heldout = _choose_heldout(train, config.heldout, context.seed)
        ids = {prompt.id for prompt in heldout}
        train = [prompt for prompt in train if prompt.id not in ids]
    questions = {_normalize(prompt) for prompt in heldout}
    unseen = [prompt for prompt in train if _normalize(prompt) not in questions]
    if not unseen:
        raise DataError(
            f"{path}: every training row is also held out; hold out fewer, or give other rows"
        )
    if len(unseen) < len(train):
        log.info(
            f"{len(train) - len(unseen)} of {len(train)} training rows left out: "
            "the same question is held out"
        )
    return PromptSet(train=unseen, heldout=heldout, grade=grade)


def _choose_heldout(prompts: Sequence[Prompt], amount: int | float, seed: int) -> list[Prompt]:
    """Choose a number or a share of the prompts by a hash of the id: new rows move few old ones."""
    hashes = {prompt.id: seed_of(seed, "heldout", prompt.id) for prompt in prompts}
    ordered = sorted(hashes.values())
    if isinstance(amount, int):
        chosen = set(ordered[:amount])
    else:
        # The hashes are 63-bit numbers, so each id is held out with the probability `amount`.
        chosen = {number for number in ordered if number < amount * 2**63}
        # A share of a few rows may choose none: then one row is held out if another remains.
        chosen |= set(ordered[:1]) if amount and len(prompts) > 1 else set()
    return [prompt for prompt in prompts if hashes[prompt.id] in chosen]


def _normalize(prompt: Prompt) -> tuple[tuple[str, str], ...]:
    return tuple((message.role, " ".join(message.content.split())) for message in prompt.messages)


def _read(path: Path, split: str, config: Config, context: TaskContext) -> list[Prompt]:
    """Return the good rows of a file and write the bad ones to the rejected file."""
    prompts: dict[str, Prompt] = {}
    rejected = 0
    first: list[str] = []
    for number, line in read_lines(path, config.max_row_bytes):
        try:
            prompt = read_prompt(line, f"{split}-{number}", config.max_row_bytes)
            _check_answer(prompt, name_function(config.verifier))
            if prompt.id in prompts:
                raise Rejected(f"id {prompt.id!r} was used before")
            prompts[prompt.id] = prompt
        except Rejected as reason:
            rejected += 1
            if len(first) < SHOWN:
                first.append(f"row {number}: {reason}")
            _write_rejected(context.rejected_path, path, number, str(reason), line)
    _check_counts(path, len(prompts), rejected, first, config.max_rejected)
    if rejected:
        log.info(
            f"{path}: {rejected} of {rejected + len(prompts)} rows rejected ({'; '.join(first)})"
        )
    return list(prompts.values())


def _check_answer(prompt: Prompt, verifier: str) -> None:
    answer = prompt.answer
    if verifier == "number" and answer is not None and find_last_number(answer) is None:
        raise Rejected(
            f"answer {answer[:EXCERPT]!r} has no number, which the verifier 'number' compares"
        )


def _check_counts(path: Path, good: int, bad: int, first: Sequence[str], allowed: float) -> None:
    if bad > allowed * (bad + good):
        raise DataError(
            f"{path}: {bad} of {bad + good} rows cannot be used ({'; '.join(first)}); mend them, "
            f"or raise task.max_rejected, which is {allowed:g}"
        )
    if not good:
        raise DataError(
            f"{path}: no rows; write one JSON object a line, for example "
            '{"prompt": "...", "answer": "..."}'
        )


def _write_rejected(
    rejected: Path | None, path: Path, number: int, reason: str, line: bytes
) -> None:
    if rejected is None:
        return
    excerpt = line[:EXCERPT].decode("utf-8", errors="replace")
    row = {"file": str(path), "row": number, "reason": reason, "text": excerpt}
    with rejected.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
