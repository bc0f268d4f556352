"""Rows to evaluate on, and the verifiers that grade the answers to them."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from practicum.errors import DataError
from practicum.foreign import name_object
from practicum.grading import program_tests
from practicum.grading.graders import FUNCTIONS, open_grader
from practicum.grading.verifiers import VERIFIERS
from practicum.rows.answered import PromptSet
from practicum.rows.prompt_reader import PromptReader, RowsConfig
from practicum.rows.row_files import read_rows
from practicum.tasks.jsonl import Config
from practicum.tasks.tools import Config as ToolsConfig
from practicum.types import Prompt

log = logging.getLogger(__name__)

READING = {"columns", "strict", "max_rejected", "sandbox"}
"""The settings of a task's rows that also apply to the rows of a benchmark."""


@dataclass(frozen=True, slots=True)
class Grading:
    """A verifier by its name; `right` is the least reward of a right answer."""

    name: str
    task: PromptSet
    right: float


def find_rows_config(task: Any) -> RowsConfig | None:
    """Return the settings of the rows that a task reads, also within `tools`; None if it reads none."""
    inner = task.task if isinstance(task, ToolsConfig) else task
    return inner if isinstance(inner, RowsConfig) else None


def fill_benchmark(
    rows: RowsConfig | None, path: str, verifier: str | Callable[..., Any]
) -> dict[str, Any]:
    """Return the fields of `jsonl.Config` for the rows of a benchmark and one of its verifiers.

    The task's settings for its own rows also apply to these rows.
    """
    fields: dict[str, Any] = {"path": path, "heldout": path, "verifier": verifier}
    if rows is None:
        return fields
    fields |= rows.model_dump(include=READING)
    if name_object(verifier) not in VERIFIERS:
        return {**fields, "reward_range": rows.reward_range}
    # `off` is for functions of the user: it is refused next to a verifier of practicum.
    return {**fields, "sandbox": "best_effort"} if rows.sandbox == "off" else fields


def open_gradings(configs: Sequence[Config]) -> list[Grading]:
    """Open the verifier of each config; DataError if its package or module is missing."""
    gradings = []
    for config in configs:
        grade = open_grader(config.verifier, config.sandbox, config.reward_range)
        name = name_object(config.verifier)
        task = PromptSet((), (), grade=grade, reads_thoughts=name not in VERIFIERS)
        gradings.append(Grading(name, task, config.reward_range[1]))
    return gradings


def read_benchmark(configs: Sequence[Config], path: Path) -> list[Prompt]:
    """Return the prompts of a file; its rows must be good for the verifiers of all configs."""
    names = [name_object(config.verifier) for config in configs]
    rows = read_rows(path, configs[0].max_row_bytes)
    reader = PromptReader(configs[0], verifiers=names)
    return reader.read(rows, str(path), "heldout", path.parent)


def check_gradings(gradings: Sequence[Grading], prompts: Sequence[Prompt], source: str) -> None:
    """Raise DataError if a field that a verifier reads is missing from all prompts; note a lack in
    some."""
    for grading in gradings:
        if grading.name in FUNCTIONS:
            lacking = sum(program_tests.FIELD not in prompt.privileged for prompt in prompts)
            remedy = "give rows with test_list, or inputs and outputs"
        elif grading.name in VERIFIERS:
            lacking = sum(prompt.answer is None for prompt in prompts)
            remedy = "give rows with answer, or name its column: task.columns={answer: COLUMN}"
        else:
            continue
        text = f"{source}: {lacking} of {len(prompts)} prompts have nothing that the verifier {grading.name} compares with"
        if lacking and (lacking == len(prompts) or grading.name in FUNCTIONS):
            raise DataError(f"{text}; {remedy}")
        if lacking:
            log.info(f"{text}; they are not counted")
