"""Trackers: services that receive the metrics of each step, through their own clients.

A recipe selects a tracker, and its package is imported when the run begins. A tracker module
defines `Config` (its recipe keys) and `build(config, context)`, which returns a `Tracker`; the
module's name is its `type` in a recipe.
"""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from practicum.errors import RecipeError, ResourceError


@dataclass(frozen=True, slots=True)
class TrackerContext:
    """The run that is tracked.

    `run` is its name, `id` stays the same after a resume, `run_dir` is its folder, and `settings` is
    its recipe by dotted key, without secrets.
    """

    run: str
    id: str
    run_dir: Path
    settings: Mapping[str, Any]


@runtime_checkable
class Tracker(Protocol):
    """One run of a tracking service.

    Every method raises ResourceError if the service fails; the run then continues without the
    tracker.
    """

    def begin(self, first_step: int) -> int:
        """Start or continue the tracked run; return the newest step that the service has stored.

        The caller sends all later steps again.
        """
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of one step."""
        ...

    def finish(self, summary: Mapping[str, float], verdict: str) -> None:
        """Send the final numbers and the verdict, a single line, of a run that was not stopped."""
        ...

    def close(self) -> None:
        """Close the connection.

        Called after every `begin`, and without `finish` for a stopped run.
        """
        ...


@contextmanager
def translate_failures(
    message: str, *failures: type[Exception], advice: str = ""
) -> Iterator[None]:
    """Turn the failures of a service into a ResourceError."""
    try:
        yield
    except failures as error:
        # Leave out the service's error text, because an address in it may contain a password.
        raise ResourceError(f"{message} ({type(error).__name__}){advice}") from None


def import_client(name: str, package: str = "") -> Any:
    """Import the module of a tracking client; RecipeError with the pip command if it is missing."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = package or name
        raise RecipeError(
            f"tracking.type: {missing!r} is not installed ({error}); "
            f"run pip install {missing}, or remove tracking"
        ) from None
