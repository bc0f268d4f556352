"""A run from its recipe to its report: assemble, evaluate, train, save, summarize."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from practicum.runs.evaluating import evaluate
    from practicum.runs.launch import (
        check_resumes,
        distill,
        record_loss,
        run,
        run_in_folder,
    )
    from practicum.runs.opening import open_run, open_student
    from practicum.runs.result import RunResult, load_run
    from practicum.runs.state import restore_components

__all__ = [
    "RunResult",
    "check_resumes",
    "distill",
    "evaluate",
    "load_run",
    "open_run",
    "open_student",
    "record_loss",
    "restore_components",
    "run",
    "run_in_folder",
]

_MODULES = {
    "evaluate": "practicum.runs.evaluating",
    "open_run": "practicum.runs.opening",
    "open_student": "practicum.runs.opening",
    "RunResult": "practicum.runs.result",
    "load_run": "practicum.runs.result",
    "restore_components": "practicum.runs.state",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, because single modules of this package are also used."""
    if name in __all__:
        return getattr(importlib.import_module(_MODULES.get(name, "practicum.runs.launch")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
