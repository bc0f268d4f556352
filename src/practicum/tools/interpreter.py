"""Python as a tool: each conversation has a separate interpreter, in the sandbox.

The interpreter starts with the first call of a conversation and keeps its variables between calls.
With `fresh`, a call knows no earlier call, as in the tool of rStar2-Agent (2508.20722): it runs in a
new copy of one interpreter, and a program that ran before is not run again.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from practicum.ports import ToolSession
from practicum.prompts import ToolSchema
from practicum.sandbox import ProcessLimits
from practicum.sandbox.calling import call_process
from practicum.sandbox.deadline import SECONDS, VerifierProcess, Walls
from practicum.types import FrozenConfig

log = logging.getLogger(__name__)

_MODULE = "practicum.sandbox.tool_interpreter"
_MOST_RESULTS = 1 << 12
"""The most results of fresh programs that are kept."""

SCHEMA = ToolSchema(
    "python",
    "Run Python and return what it prints, and the value of its last expression.",
    {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "the program"}},
        "required": ["code"],
    },
)


class Config(FrozenConfig):
    """The deadline of a call, and the memory, the walls and the life of an interpreter."""

    type: Literal["interpreter"] = "interpreter"
    seconds: float = Field(default=SECONDS, gt=0, description="the longest call")
    memory: int = Field(default=512, ge=128, description="MiB of address space")
    sandbox: Walls = Field(
        default="require",
        description="a missing wall around the programs of the model: refuse, do without it",
    )
    fresh: bool = Field(
        default=False,
        description="start each call without variables, in a copy of one interpreter for all "
        "conversations; a program that ran before is not run again, and results have at most 640 "
        "characters",
    )


@dataclass(frozen=True, slots=True)
class InterpreterTool:
    """Interpreters with the same settings: one per conversation, or `shared` by all.

    `results` are the results of the programs that ran in the shared one.
    """

    config: Config
    shared: VerifierProcess | None = None
    schemas: Sequence[ToolSchema] = (SCHEMA,)
    results: dict[str, str] = field(default_factory=dict)

    def open(self, seed: int) -> ToolSession:
        """Return an interpreter with `random` seeded by `seed`; no process starts yet.

        In a shared interpreter every call begins with the seed 0.
        """
        if self.shared is not None:
            return FreshSession(self.shared, self.config.seconds, self.results)
        return InterpreterSession(_build_process(self.config, seed), self.config.seconds)


@dataclass(frozen=True, slots=True)
class InterpreterSession(ToolSession):
    """The interpreter of one conversation."""

    process: VerifierProcess
    seconds: float

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return what the program prints; ToolProblem if it fails or takes too long."""
        return call_process(self.process, arguments, self.seconds)

    def close(self) -> None:
        """End the interpreter."""
        self.process.close()


@dataclass(frozen=True, slots=True)
class FreshSession(ToolSession):
    """The interpreter that all conversations share; it outlives them."""

    process: VerifierProcess
    seconds: float
    results: dict[str, str]

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return what the program prints without earlier programs; ToolProblem if it fails."""
        key = repr(arguments)
        result = self.results.get(key)
        if result is None:
            result = call_process(self.process, arguments, self.seconds)
            if len(self.results) < _MOST_RESULTS:
                self.results[key] = result
        return result


def _build_process(config: Config, seed: int) -> VerifierProcess:
    return VerifierProcess(
        _MODULE,
        str(seed),
        *((config.sandbox,) if config.fresh else ()),
        seconds=config.seconds,
        sandbox=config.sandbox,
        limits=ProcessLimits(memory=config.memory << 20),
        what="tool",
        forks=config.fresh,
        pauses=not config.fresh,
    )


def build(config: Config) -> InterpreterTool:
    """Return the tool; SandboxError if a required wall is missing."""
    process = _build_process(config, 0)
    note = process.check_walls()
    if note is not None:
        log.info(note)
    return InterpreterTool(config, process if config.fresh else None)
