"""One file a source of prompts with its verifier; the file's name is the recipe's key."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from practicum.tasks._answered import PromptSet
    from practicum.tasks._context import TaskContext
    from practicum.tasks._episodes import FunctionEpisode

__all__ = ["FunctionEpisode", "PromptSet", "TaskContext"]

_HOMES = {
    "PromptSet": "practicum.tasks._answered",
    "FunctionEpisode": "practicum.tasks._episodes",
    "TaskContext": "practicum.tasks._context",
}


def __getattr__(name: str) -> Any:
    # Verifiers' processes import this package for `_worker`: they start in a fraction of the time without tensors.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
