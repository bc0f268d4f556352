"""M25, the only monitor that reads the clock: the seconds per token of each phase.

Its lines are logged and not written to a file. The rows of alarms.jsonl must not depend on the
number of resumes or on the load of the machine, and times depend on both.
"""

import statistics
from collections.abc import Mapping

BASELINE_STEPS, PERSISTENCE, FACTOR = 10, 10, 2.0
"""A phase is slow after ten steps at over twice the median seconds per token of the first ten."""

MIN_SHARE = 0.1
"""A phase that takes a smaller share of the step's seconds is never reported."""


class PhaseSpeedMonitor:
    """The seconds per token of each phase so far.

    With `overlapping` phases, a phase's seconds are only the time that the step waited for it, so
    the step is judged as one phase.
    """

    def __init__(self, overlapping: bool = False) -> None:
        self._overlapping = overlapping
        self._baselines: dict[str, list[float]] = {}
        self._streaks: dict[str, int] = {}
        self._slow_phases: set[str] = set()

    def judge(self, metrics: Mapping[str, float]) -> list[str]:
        """Return a warning for each phase that has been slow for ten steps in a row.

        A phase is reported again only after ten steps at normal speed.
        """
        lines = []
        tokens = metrics.get("rollouts", 0.0) * metrics.get("length", 0.0)
        phases = self._read_phases(metrics)
        for phase, seconds in phases.items() if tokens else ():
            baseline = self._baselines.setdefault(phase, [])
            if len(baseline) < BASELINE_STEPS:
                baseline.append(seconds / tokens)
                continue
            ratio = seconds / tokens / max(statistics.median(baseline), 1e-12)
            is_slow = ratio > FACTOR and seconds > MIN_SHARE * sum(phases.values())
            # The streak counts steps that contradict the phase's state. Ten of them change the
            # state, so a clock that goes up and down every other step changes nothing.
            contradicts = is_slow is not (phase in self._slow_phases)
            self._streaks[phase] = self._streaks.get(phase, 0) + 1 if contradicts else 0
            if self._streaks[phase] < PERSISTENCE:
                continue
            self._streaks[phase] = 0
            if is_slow:
                self._slow_phases.add(phase)
                lines.append(
                    f"M25 pace: {phase} takes {ratio:.2g} times the seconds per token "
                    f"of the first {BASELINE_STEPS} steps"
                )
            else:
                self._slow_phases.remove(phase)
        return lines

    def _read_phases(self, metrics: Mapping[str, float]) -> dict[str, float]:
        phases = {
            name.removeprefix("seconds_"): seconds
            for name, seconds in metrics.items()
            if name.startswith("seconds_")
        }
        return {"step": sum(phases.values())} if self._overlapping else phases
