"""Tasks: one file for each source of prompts with its verifier, named as in a recipe."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from practicum.tasks._answered import PromptSet, keep_answer
    from practicum.tasks._benchmark import (
        Grading,
        check_gradings,
        fill_benchmark,
        find_rows_config,
        open_gradings,
        read_benchmark,
    )
    from practicum.tasks._context import TaskContext
    from practicum.tasks._episodes import FunctionEpisode
    from practicum.tasks._files import count_rows
    from practicum.tasks._prompts import describe_long_answers

__all__ = [
    "FunctionEpisode",
    "Grading",
    "PromptSet",
    "TaskContext",
    "check_gradings",
    "count_rows",
    "describe_long_answers",
    "fill_benchmark",
    "find_rows_config",
    "keep_answer",
    "open_gradings",
    "read_benchmark",
]

_MODULES = {
    "Grading": "practicum.tasks._benchmark",
    "check_gradings": "practicum.tasks._benchmark",
    "fill_benchmark": "practicum.tasks._benchmark",
    "find_rows_config": "practicum.tasks._benchmark",
    "open_gradings": "practicum.tasks._benchmark",
    "read_benchmark": "practicum.tasks._benchmark",
    "PromptSet": "practicum.tasks._answered",
    "keep_answer": "practicum.tasks._answered",
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
