"""Find the best step of a run by a measure of its evaluations during training.

The journal of metrics decides, so a resumed run and a reader of the folder find the same step. Only
a step with a checkpoint can be the best step.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from practicum.run_dir import shapes
from practicum.run_dir.checkpoints import is_complete, step_folders
from practicum.run_dir.folder import RunDir
from practicum.run_dir.journal import read_rows

BestMetric = Literal["accuracy", "reverse_kl"]
"""A measure of an evaluation that chooses the best checkpoint."""

COLLAPSED = "heldout_collapsed"
"""The reading that is 1 after a step that destroyed the student."""

# Without the exact divergence, its estimate is stored under a separate name.
_READINGS = {
    "accuracy": ("heldout_accuracy",),
    "reverse_kl": ("heldout_reverse_kl", "heldout_reverse_kl_estimate"),
}
_SIGNS = {"accuracy": 1.0, "reverse_kl": -1.0}
METRICS: tuple[BestMetric, ...] = ("accuracy", "reverse_kl")


@dataclass(slots=True)
class BestTracker:
    """Follow a measure from step to step: the best `step` and its `score`, None before the first.

    The earliest of equal steps is the best. Without a `metric` no step is.
    """

    metric: BestMetric | None
    step: int | None = None
    score: float | None = None

    def update(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Return True if the step is better than all before, by the readings among its metrics."""
        if self.metric is None:
            return False
        score = read_score(self.metric, metrics)
        if score is None or metrics.get(COLLAPSED):
            return False
        return self._take(step, score)

    def merge(self, summary: Mapping[str, Any] | None) -> None:
        """Continue from an earlier result of `summarize`, if the metric is the same."""
        if summary is not None and summary["metric"] == self.metric and summary["step"] is not None:
            self._take(summary["step"], summary["score"])

    def summarize(self, last: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the best step for `summary.json` and the `last` readings; None without a metric."""
        if self.metric is None:
            return None
        return {**asdict(self), "last": read_score(self.metric, last)}

    def _take(self, step: int, score: float) -> bool:
        """Return True if a step with this score is better than all before, and remember it."""
        assert self.metric is not None, "a step is the best one by a metric"
        sign = _SIGNS[self.metric]
        if self.score is not None and sign * score <= sign * self.score:
            return False
        self.step, self.score = step, score
        return True


def read_score(metric: BestMetric, metrics: Mapping[str, Any]) -> float | None:
    """Return the value of a measure, or None if it is missing, null or not finite."""
    numbers = (metrics.get(name) for name in _READINGS[metric])
    return next((n for n in numbers if n is not None and math.isfinite(n)), None)


def recall_best(run_dir: RunDir, metric: BestMetric | None) -> BestTracker:
    """Return the best recorded step with a complete checkpoint."""
    tracker = BestTracker(metric)
    if metric is None or not run_dir.metrics_jsonl.is_file():
        return tracker
    saved = {step for step, path in step_folders(run_dir.checkpoints) if is_complete(path, step)}
    for row in read_rows(run_dir.metrics_jsonl, shapes.METRICS):
        if row["step"] in saved:
            tracker.update(row["step"], row)
    return tracker
