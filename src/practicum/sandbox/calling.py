"""Calls of tools that run in a separate process, each with a deadline."""

from collections.abc import Mapping
from typing import Any

from practicum.errors import DataError
from practicum.ports.gate import reject
from practicum.ports.tasks import ToolProblem
from practicum.sandbox import NoLine, TooSlow
from practicum.sandbox.deadline import VerifierFailed, VerifierProcess

LARGEST_RESULT = 1 << 20
"""Bytes of the line with a tool's answer."""


def call_process(process: VerifierProcess, arguments: Mapping[str, Any], seconds: float) -> str:
    """Return the text that a tool's process answers to a call; ToolProblem if the call fails.

    The process answers `{"result": ...}`, or `{"invalid": ...}` if it does not take the arguments.
    """
    try:
        answer = process.ask({"arguments": dict(arguments)}, seconds, LARGEST_RESULT)
    except TooSlow:
        raise ToolProblem("timeout", f"the tool took longer than {seconds:g} s") from None
    except DataError:
        process.close()
        raise ToolProblem("failed", "the tool refused to answer") from None
    except NoLine as reason:
        raise ToolProblem("failed", f"the tool broke off: {reason}") from None
    except VerifierFailed as failure:
        raise ToolProblem("failed", str(failure)) from None
    match answer:
        case {"result": str() as result} if len(answer) == 1:
            return result
        case {"invalid": str() as reason} if len(answer) == 1:
            raise ToolProblem("invalid", reason)
    # A program can write to the process's answers itself, and its children may still be running.
    process.close()
    reject("type", f"a tool's process answered {answer!r:.80}")
    raise ToolProblem("failed", "the tool returned an invalid result")
