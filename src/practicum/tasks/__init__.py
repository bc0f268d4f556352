"""Tasks: one file for each source of prompts with its verifier, named as in a recipe."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from practicum.tasks._answered import PromptSet
    from practicum.tasks._context import TaskContext
    from practicum.tasks._episodes import FunctionEpisode
    from practicum.tasks._files import count_rows
    from practicum.tasks._prompts import describe_long_answers

__all__ = ["FunctionEpisode", "PromptSet", "TaskContext", "count_rows", "describe_long_answers"]

_MODULES = {
    "PromptSet": "practicum.tasks._answered",
    "FunctionEpisode": "practicum.tasks._episodes",
    "TaskContext": "practicum.tasks._context",
    "count_rows": "practicum.tasks._files",
    "describe_long_answers": "practicum.tasks._prompts",
}


def __getattr__(name: str) -> Any:
    # The processes of verifiers import this package for `_worker` alone. Without torch, which these
    # need, they start in a fraction of the time.
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
