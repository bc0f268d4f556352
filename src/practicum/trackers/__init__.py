"""Trackers: where the metrics of each step can go besides the run folder, through each service's own client.

None is used unless a recipe asks for it, and then its package is imported when the run begins. A tracker module defines
`Config` (its recipe keys) and `build(config, context)`, which returns a `Tracker`; the module's name is its `type` in a recipe.
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
    """The run's name, an id that stays over resumes, its folder, and its recipe as flat settings without secrets."""

    run: str
    id: str
    home: Path
    settings: Mapping[str, Any]


@runtime_checkable
class Tracker(Protocol):
    """One run of a tracking service. ResourceError where the service fails; the run then goes on without it."""

    def begin(self, first_step: int) -> int:
        """Start the tracked run, or go on with it; the newest step that it holds for certain, so that later ones are sent."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of one step."""
        ...

    def finish(self, summary: Mapping[str, float]) -> None:
        """The run is over, and these numbers are what came of it."""
        ...

    def close(self) -> None:
        """Let go of the service; without `finish` the run was stopped. Comes after every `begin`."""
        ...


@contextmanager
def telling(what: str, *failures: type[Exception], advice: str = "") -> Iterator[None]:
    """Turn the failures of a service into one ResourceError, without its words, in which an address may hold a password."""
    try:
        yield
    except failures as error:
        raise ResourceError(f"{what} ({type(error).__name__}){advice}") from None


def client(name: str, package: str = "") -> Any:
    """A tracking client's module; RecipeError with the command that installs it where it is missing."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = package or name
        raise RecipeError(
            f"tracking.type: {missing!r} is not installed ({error}); write pip install {missing}, or leave tracking out"
        ) from None
