"""M25, the one monitor that reads the clock: seconds a token of each phase, against the run's own beginning.

What it finds is said and goes nowhere else, for alarms come out the same however often a run is resumed and whatever else the
machine is doing.
"""

import statistics
from collections.abc import Mapping

BASELINE, PERSISTENCE, FACTOR = 10, 5, 1.5
"""A phase is off its pace when so many steps in a row are that much slower or faster than the median of the first ten."""


class Pace:
    """The seconds a token of each phase so far; see `judge`."""

    def __init__(self) -> None:
        self._first: dict[str, list[float]] = {}
        self._off: dict[str, int] = {}

    def judge(self, metrics: Mapping[str, float]) -> list[str]:
        """One line for each phase that has just been off its pace for long enough, once until it is back."""
        lines = []
        tokens = metrics.get("rollouts", 0.0) * metrics.get("length", 0.0)
        for name in (name for name in metrics if name.startswith("seconds_") and tokens):
            phase, each = name.removeprefix("seconds_"), metrics[name] / tokens
            first = self._first.setdefault(phase, [])
            if len(first) < BASELINE:
                first.append(each)
                continue
            ratio = each / max(statistics.median(first), 1e-12)
            self._off[phase] = self._off.get(phase, 0) + 1 if not 1 / FACTOR <= ratio <= FACTOR else 0
            if self._off[phase] == PERSISTENCE:
                lines.append(
                    f"M25 pace: {phase} takes {ratio:.2g} times the seconds a token that it took in the first {BASELINE} steps"
                )
        return lines
