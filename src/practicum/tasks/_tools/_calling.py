"""Calls of tools that run in a process of their own, each with a deadline."""

from collections.abc import Mapping
from typing import Any

from practicum.ports.tasks import ToolProblem
from practicum.tasks._deadline import VerifierFailed, VerifierProcess
from practicum.tasks._sandbox import NoLine, TooSlow


def call_process(process: VerifierProcess, arguments: Mapping[str, Any], seconds: float) -> str:
    """Return the text that a tool's process answers to a call; ToolProblem if there is none.

    The process answers `{"result": ...}`, or `{"invalid": ...}` if it does not take the arguments.
    """
    try:
        answer = process.ask({"arguments": dict(arguments)}, seconds)
    except TooSlow:
        raise ToolProblem("timeout", f"the tool took longer than {seconds:g} s") from None
    except NoLine as reason:
        raise ToolProblem("failed", f"the tool broke off: {reason}") from None
    except VerifierFailed as failure:
        raise ToolProblem("failed", str(failure)) from None
    if "invalid" in answer:
        raise ToolProblem("invalid", str(answer["invalid"]))
    return str(answer["result"])
