"""Python as a tool: each conversation has a separate interpreter, in the sandbox.

The interpreter starts with the first call of a conversation and keeps its variables between calls.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from practicum.prompts import ToolSchema
from practicum.sandbox import ProcessLimits
from practicum.sandbox.calling import call_process
from practicum.sandbox.deadline import SECONDS, VerifierProcess, Walls
from practicum.types import FrozenConfig

log = logging.getLogger(__name__)

_MODULE = "practicum.sandbox.tool_interpreter"

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
    """The deadline of a call, and the memory and the walls of an interpreter."""

    type: Literal["interpreter"] = "interpreter"
    seconds: float = Field(default=SECONDS, gt=0, description="the longest call")
    memory: int = Field(default=512, ge=128, description="MiB of address space")
    sandbox: Walls = Field(
        default="require",
        description="a missing wall around the programs of the model: refuse, do without it",
    )


@dataclass(frozen=True, slots=True)
class InterpreterTool:
    """Interpreters with the same settings, one for each conversation."""

    config: Config
    schemas: Sequence[ToolSchema] = (SCHEMA,)

    def open(self, seed: int) -> "InterpreterSession":
        """Return an interpreter with `random` seeded by `seed`; no process starts yet."""
        return InterpreterSession(_build_process(self.config, seed), self.config.seconds)


@dataclass(frozen=True, slots=True)
class InterpreterSession:
    """The interpreter of one conversation."""

    process: VerifierProcess
    seconds: float

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return what the program prints; ToolProblem if it fails or takes too long."""
        return call_process(self.process, arguments, self.seconds)

    def close(self) -> None:
        """End the interpreter."""
        self.process.close()


def _build_process(config: Config, seed: int) -> VerifierProcess:
    return VerifierProcess(
        _MODULE,
        str(seed),
        seconds=config.seconds,
        sandbox=config.sandbox,
        limits=ProcessLimits(memory=config.memory << 20),
        what="tool",
        pauses=True,
    )


def build(config: Config) -> InterpreterTool:
    """Return the tool; SandboxError if a required wall is missing."""
    note = _build_process(config, 0).check_walls()
    if note is not None:
        log.info(note)
    return InterpreterTool(config)
