"""A user's function as a tool: it is called in a separate process, with a deadline."""

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator

from practicum.errors import DataError
from practicum.foreign import explain_missing, is_external
from practicum.prompts import ToolSchema
from practicum.sandbox.calling import call_process
from practicum.sandbox.deadline import SECONDS, START_SECONDS, OwnWalls, VerifierProcess
from practicum.types import FrozenConfig

log = logging.getLogger(__name__)

_MODULE = "practicum.sandbox.tool_function"


class Config(FrozenConfig):
    """The function, its deadline and its walls."""

    type: Literal["function"] = "function"
    function: str = Field(description="a function of yours as `package.module:function`")
    seconds: float = Field(default=SECONDS, gt=0, description="the longest call")
    sandbox: OwnWalls = Field(
        default="require",
        description="a missing wall around the function: refuse, do without it; `off`: no walls",
    )

    @field_validator("function")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not is_external(name):
            raise ValueError(f"{name!r} names no function; write package.module:function")
        return name


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A function in its process; conversations share it, so it should keep no state."""

    schemas: Sequence[ToolSchema]
    process: VerifierProcess
    seconds: float

    def open(self, seed: int) -> "FunctionTool":
        """Return the tool itself, for every conversation."""
        return self

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the function's result as text; ToolProblem if the call fails."""
        return call_process(self.process, arguments, self.seconds)

    def close(self) -> None:
        """Do nothing: the process serves other conversations too."""


def build(config: Config) -> FunctionTool:
    """Start the function's process and read its schema; DataError if it is no tool."""
    if problem := explain_missing(config.function):
        raise DataError(f"task.tools: {problem}")
    process = VerifierProcess(
        _MODULE,
        config.function,
        seconds=config.seconds,
        sandbox=config.sandbox,
        # A notebook, say, imports from its working folder.
        path=[entry or "." for entry in sys.path],
        imports=(config.function.partition(":")[0],),
        what="tool",
        name=config.function,
        pauses=True,
    )
    note = process.check_walls()
    if note is not None:
        log.info(note)
    try:
        schema = process.ask({}, START_SECONDS)
    except DataError as error:
        raise DataError(f"task.tools: {error}") from None
    return FunctionTool((ToolSchema(**schema),), process, config.seconds)
