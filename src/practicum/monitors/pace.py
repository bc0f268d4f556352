"""M25, the one monitor that reads the clock: seconds a token of each phase, against the run's own beginning.

What it finds is said and goes nowhere else, for alarms come out the same however often a run is resumed and whatever else the
machine is doing.
"""

import statistics
from collections.abc import Mapping

BASELINE, PERSISTENCE, FACTOR = 10, 10, 2.0
"""A phase is off its pace when so many steps in a row are so many times slower than the median of the first ten."""

SHARE = 0.1
"""A phase that takes less of the step's seconds than this is not worth a word."""


class PhaseSpeedMonitor:
    """The seconds a token of each phase so far; see `judge`.

    Where phases overlap, a phase's seconds are those that were waited for it, so the step is judged as one.
    """

    def __init__(self, overlapping: bool = False) -> None:
        self._overlapping = overlapping
        self._first: dict[str, list[float]] = {}
        self._run: dict[str, int] = {}
        self._off: set[str] = set()

    def judge(self, metrics: Mapping[str, float]) -> list[str]:
        """One line for each phase that has just been off its pace for long enough, once until it has been back for as long."""
        lines = []
        tokens = metrics.get("rollouts", 0.0) * metrics.get("length", 0.0)
        seconds = self._seconds(metrics)
        for phase, taken in seconds.items() if tokens else ():
            first = self._first.setdefault(phase, [])
            if len(first) < BASELINE:
                first.append(taken / tokens)
                continue
            ratio = taken / tokens / max(statistics.median(first), 1e-12)
            slow = ratio > FACTOR and taken > SHARE * sum(seconds.values())
            self._run[phase] = (
                self._run.get(phase, 0) + 1 if slow is not (phase in self._off) else 0
            )
            if self._run[phase] < PERSISTENCE:
                continue
            self._run[phase] = 0
            if slow:
                self._off.add(phase)
                lines.append(
                    f"M25 pace: {phase} takes {ratio:.2g} times the seconds a token that it took in the first {BASELINE} steps"
                )
            else:
                self._off.remove(phase)
        return lines

    def _seconds(self, metrics: Mapping[str, float]) -> dict[str, float]:
        phases = {
            name.removeprefix("seconds_"): value
            for name, value in metrics.items()
            if name.startswith("seconds_")
        }
        return {"step": sum(phases.values())} if self._overlapping else phases
