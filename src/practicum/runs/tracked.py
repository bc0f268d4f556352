"""Send a run's metrics to its tracker, without ever stopping the run."""

import logging
import math
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from practicum.core.plugins import load_plugin
from practicum.errors import ResourceError
from practicum.recipe import Recipe, resolve_recipe
from practicum.report.outcome_verdict import format_reasons
from practicum.run_dir import RunDir, read_json, read_rows, shapes, write_json
from practicum.trackers import Tracker, TrackerContext

log = logging.getLogger(__name__)

SECRET = re.compile(r"(^|_)(api_?key|key|token|secret|password|credentials?|auth)$", re.IGNORECASE)
"""The names of settings with secret text; numbers such as `prompt_tokens` are sent."""

UNSENT_KEYS = frozenset({"base_dir", "about", "claim", "differs", "reduced", "teacher_effect"})
"""Settings that are never sent: paths of this machine and long texts."""


class RunTracker:
    """The tracker of one run, or none. It opens at the first step and is dropped once it fails."""

    def __init__(self, tracker: Tracker | None, rows: Path) -> None:
        self._tracker = tracker
        self._rows = rows
        self._is_started = False
        self._last_confirmed_step = 0

    @classmethod
    def open(cls, recipe: Recipe, run_dir: RunDir) -> "RunTracker":
        """Open the tracker that a recipe names; raises RecipeError if its package is missing."""
        if recipe.tracking is None:
            return cls(None, run_dir.metrics_jsonl)
        kind = str(recipe.tracking.type)
        settings = dict(flatten_settings(resolve_recipe(recipe)))
        run_id = _load_run_id(run_dir, kind)
        context = TrackerContext(recipe.name, run_id, run_dir.path, settings)
        tracker = load_plugin("trackers", kind).build(recipe.tracking, context)
        return cls(tracker, run_dir.metrics_jsonl)

    def __enter__(self) -> "RunTracker":
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_started:
            self._call_or_disable(lambda tracker: tracker.close())

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send a step's finite metrics, unless the tracker has the step already."""
        # The tracker opens with the first step, so a run that fails before leaves nothing there.
        if not self._is_started:
            self._is_started = True
            self._call_or_disable(lambda tracker: self._begin(tracker, step))
        if step > self._last_confirmed_step:
            self._call_or_disable(lambda tracker: tracker.log(step, _filter_finite(metrics)))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Send the verdict, and the numbers of the summary as `final/after/accuracy` and so on."""
        if self._is_started:
            numbers = _filter_finite(dict(_collect_numbers(summary, "final/")))
            verdict = format_reasons(summary["verdict"])
            self._call_or_disable(lambda tracker: tracker.finish(numbers, verdict))

    def _begin(self, tracker: Tracker, first: int) -> None:
        """Open the tracker, and send the earlier steps that it has not confirmed."""
        self._last_confirmed_step = tracker.begin(first)
        for row in read_rows(self._rows, shapes.METRICS) if self._rows.is_file() else ():
            if self._last_confirmed_step < row["step"] < first:
                metrics = {name: row[name] for name in row if name != "step"}
                tracker.log(row["step"], _filter_finite(metrics))

    def _call_or_disable(self, call: Callable[[Tracker], None]) -> None:
        """Call the tracker, and drop it if it fails: the run continues without tracking."""
        if self._tracker is None:
            return
        try:
            call(self._tracker)
        except ResourceError as error:
            log.warning(
                f"{error}; the run continues without tracking, and metrics.jsonl has all metrics"
            )
            self._tracker = None


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings by dotted name, without secrets, machine paths and None."""
    for name, setting in settings.items():
        if isinstance(setting, Mapping):
            yield from flatten_settings(setting, f"{prefix}{name}.")
        elif isinstance(setting, list):
            by_index = {str(index): element for index, element in enumerate(setting)}
            yield from flatten_settings(by_index, f"{prefix}{name}.")
        elif setting is not None and name not in UNSENT_KEYS:
            is_secret = isinstance(setting, str) and SECRET.search(name)
            if not is_secret:
                yield f"{prefix}{name}", setting


def _load_run_id(run_dir: RunDir, kind: str) -> str:
    """Return the run's id at the tracker, which is the same after a resume."""
    path = run_dir.path / "tracking.json"
    saved = read_json(path, shapes.TRACKING) if path.is_file() else {}
    if saved.get("type") != kind:
        saved = {"type": kind, "id": uuid.uuid4().hex}
        write_json(path, saved)
    return saved["id"]


def _collect_numbers(summary: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a summary by their path, of intervals and estimates the means; an
    estimate's standard error has the name `NAME_se`.
    """
    for name, entry in summary.items():
        if isinstance(entry, Mapping) and "mean" in entry:
            yield f"{prefix}{name}", float(entry["mean"])
            if entry.get("se") is not None:
                yield f"{prefix}{name}_se", float(entry["se"])
        elif isinstance(entry, Mapping):
            yield from _collect_numbers(entry, f"{prefix}{name}/")
        elif isinstance(entry, int | float) and not isinstance(entry, bool):
            yield f"{prefix}{name}", float(entry)


def _filter_finite(metrics: Mapping[str, float | None]) -> dict[str, float]:
    return {
        name: float(number)
        for name, number in metrics.items()
        if number is not None and math.isfinite(number)
    }
