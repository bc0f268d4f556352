"""M25, the one monitor that reads the clock: seconds a token of each phase, against the run's own beginning.

What it finds is said and goes nowhere else, for alarms come out the same however often a run is resumed and whatever else the
machine is doing.
"""

import statistics
from collections.abc import Mapping

BASELINE, PERSISTENCE, FACTOR = 10, 5, 1.5
"""A phase is off its pace when so many steps in a row are that much slower or faster than the median of the first ten."""


class Pace:
    """The seconds a token of each phase so far; see `judge`.

    Where phases overlap, a phase's seconds are those that were waited for it, so the step is judged as one.
    """

    def __init__(self, overlapping: bool = False) -> None:
        self._overlapping = overlapping
        self._first: dict[str, list[float]] = {}
        self._off: dict[str, int] = {}

    def judge(self, metrics: Mapping[str, float]) -> list[str]:
        """One line for each phase that has just been off its pace for long enough, once until it is back."""
        lines = []
        tokens = metrics.get("rollouts", 0.0) * metrics.get("length", 0.0)
        for phase, seconds in self._seconds(metrics).items() if tokens else ():
            each = seconds / tokens
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

    def _seconds(self, metrics: Mapping[str, float]) -> dict[str, float]:
        phases = {
            name.removeprefix("seconds_"): value for name, value in metrics.items() if name.startswith("seconds_")
        }
        return {"step": sum(phases.values())} if self._overlapping else phases
