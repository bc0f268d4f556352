"""Compute an expression with Python: the task `calculator` with the tool of rStar2-Agent (2508.20722).

The model writes a program, `[python(code="3*4")]`, and reads what it prints and the value of its last
expression, or the error. As in the released code (microsoft/rStar), a program sees no variables of
earlier programs: each one runs in a copy of one sandboxed interpreter. A program that succeeded before
is not run again. Results have at most 640 characters.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from practicum.ports import Task, TaskContext
from practicum.sandbox.calling import call_process
from practicum.sandbox.deadline import SECONDS, VerifierProcess, Walls
from practicum.tasks import calculator
from practicum.tools.interpreter import SCHEMA
from practicum.types import Prompt, ToolUse

log = logging.getLogger(__name__)

MOST_RESULTS = 1 << 12
"""The most results of programs that are kept."""


class Config(calculator.Config):
    """The expressions, and the walls around the programs of the model."""

    type: Literal["python_expressions"] = "python_expressions"  # type: ignore[assignment]
    sandbox: Walls = Field(
        default="require",
        description="a missing wall around the programs of the model: refuse, do without it",
    )


@dataclass(frozen=True, slots=True)
class PythonTool(calculator.Calculator):
    """The tool `python` of every conversation; see `practicum.ports.Toolbox`."""

    process: VerifierProcess
    results: dict[str, str] = field(default_factory=dict)

    @property
    def use(self) -> ToolUse:
        """The schema of the tool."""
        return ToolUse((SCHEMA,), "pythonic")

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return what the program prints; ToolProblem if it fails or takes too long."""
        key = repr(arguments)
        if key in self.results:
            return self.results[key]
        result = call_process(self.process, arguments, SECONDS)
        if len(self.results) < MOST_RESULTS:
            self.results[key] = result
        return result


@dataclass(frozen=True)
class PythonExpressions(calculator.Expressions):
    """Expressions with Python, and an expert that uses it."""

    def expert(self, prompt: Prompt, turns: Sequence[str]) -> Mapping[str, float]:
        """Return the right turns: first the program, then the value."""
        if turns:
            return super().expert(prompt, turns)
        return {f'[{SCHEMA.name}(code="{prompt.messages[-1].content}")]': 1.0}


def build(config: Config, context: TaskContext) -> Task:
    """Draw the expressions; SandboxError if a required wall is missing."""
    task = calculator.build(config, context)
    assert isinstance(task, calculator.Expressions)
    process = VerifierProcess(
        *("practicum.sandbox.tool_interpreter", "0", config.sandbox),
        sandbox=config.sandbox,
        what="tool",
        forks=True,
    )
    note = process.check_walls()
    if note is not None:
        log.info(note)
    tool = PythonTool(config.turns, config.bad_calls, process)
    return PythonExpressions(
        task.train, task.heldout, calculator=tool, tags=config.tags, sloppy=config.sloppy
    )
