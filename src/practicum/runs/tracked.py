"""A run and the tracker that its recipe asks for: opened late, never in the way, continued by a resume."""

import logging
import math
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from practicum.core.plugins import module_of
from practicum.errors import ResourceError
from practicum.recipe import Recipe, resolved
from practicum.run_dir import RunDir, read_json, read_rows, shapes, write_json
from practicum.trackers import Tracker, TrackerContext

log = logging.getLogger(__name__)

SECRET = re.compile(r"(^|_)(api_?key|key|token|secret|password|credentials?|auth)$", re.IGNORECASE)
"""Names of settings whose text is not sent; `prompt_tokens` and the like are numbers and are."""

UNSENT_KEYS = frozenset({"base_dir", "about", "claim", "differs", "reduced"})
"""What says more of the machine, or is longer, than a tracker needs."""


class RunTracker:
    """The tracker of one run, or none. It begins at the first step, and one that fails is left out of the rest."""

    def __init__(self, tracker: Tracker | None, rows: Path) -> None:
        self._tracker = tracker
        self._rows = rows
        self._begun = False
        self._there = 0

    @classmethod
    def open(cls, recipe: Recipe, home: RunDir) -> "RunTracker":
        """The tracker that a recipe asks for; RecipeError where its package is missing."""
        if recipe.tracking is None:
            return cls(None, home.metrics_jsonl)
        kind = str(recipe.tracking.type)
        context = TrackerContext(
            recipe.name, _id(home, kind), home.path, dict(flatten_settings(resolved(recipe)))
        )
        return cls(module_of("trackers", kind).build(recipe.tracking, context), home.metrics_jsonl)

    def __enter__(self) -> "RunTracker":
        return self

    def __exit__(self, *_: object) -> None:
        if self._begun and self._tracker is not None:
            self._call_or_disable(self._tracker.close)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send a step's finite numbers, unless the tracker holds the step already."""
        tracker = self._tracker
        if tracker is not None and not self._begun:
            self._begun = True
            self._call_or_disable(lambda: self._begin(tracker, step))
        if self._tracker is not None and step > self._there:
            self._call_or_disable(lambda: tracker.log(step, _finite(metrics)) if tracker else None)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Send what the run came to, as `final/after/accuracy` and so on."""
        tracker = self._tracker
        if tracker is not None and self._begun:
            numbers = {f"final/{name}": value for name, value in _numbers("", summary)}
            self._call_or_disable(lambda: tracker.finish(_finite(numbers)))

    def _begin(self, tracker: Tracker, first: int) -> None:
        """Open the tracker, and send the earlier steps that it does not hold for certain."""
        self._there = tracker.begin(first)
        for row in read_rows(self._rows, shapes.METRICS) if self._rows.is_file() else ():
            if self._there < row["step"] < first:
                tracker.log(
                    row["step"], _finite({name: row[name] for name in row if name != "step"})
                )

    def _call_or_disable(self, call: Callable[[], None]) -> None:
        """Call the tracker; the run outlives its failure."""
        try:
            call()
        except ResourceError as error:
            log.warning(
                f"{error}; the run goes on without tracking, and metrics.jsonl holds everything"
            )
            self._tracker = None


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by dotted name, without secrets, machine paths and what is not set."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flatten_settings(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            yield from flatten_settings(
                {str(place): item for place, item in enumerate(value)}, f"{prefix}{name}."
            )
        elif (
            value is not None
            and name not in UNSENT_KEYS
            and not (isinstance(value, str) and SECRET.search(name))
        ):
            yield f"{prefix}{name}", value


def _id(home: RunDir, kind: str) -> str:
    """The id under which a tracker knows this run, the same after a resume."""
    path = home.path / "tracking.json"
    saved = read_json(path, shapes.TRACKING) if path.is_file() else {}
    if saved.get("type") != kind:
        saved = {"type": kind, "id": uuid.uuid4().hex}
        write_json(path, saved)
    return saved["id"]


def _numbers(prefix: str, summary: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a summary by their place, an interval as its mean."""
    for name, value in summary.items():
        if isinstance(value, Mapping) and "mean" in value:
            yield f"{prefix}{name}", float(value["mean"])
        elif isinstance(value, Mapping):
            yield from _numbers(f"{prefix}{name}/", value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", float(value)


def _finite(metrics: Mapping[str, float | None]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in metrics.items()
        if value is not None and math.isfinite(value)
    }
