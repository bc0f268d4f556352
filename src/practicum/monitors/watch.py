"""Watch a run: its readings, and its alarms, which depend only on the rows of metrics.jsonl."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from practicum.monitors.facts import RecipeFacts
from practicum.monitors.history import HELDOUT, History, StepView
from practicum.monitors.patches import Patch, round_digits
from practicum.monitors.readings import compute_readings
from practicum.monitors.settings import ACTIONS, MonitorSettings, parse_factor
from practicum.monitors.table import MONITORS, Monitor, Thresholds, find_monitor
from practicum.ports.gate import call_part
from practicum.types import Metrics, StepResult

RECOVERED_BELOW = 0.8
"""A monitor that raised an alarm is silent until its score falls below this: 20 % hysteresis."""

Accepts = Callable[[Sequence[str]], bool]
"""A function that returns True if the recipe accepts these overrides, written `key=value`."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """One row of alarms.jsonl: a reading that broke a rule at a step, and its consequences.

    `n` counts the completions behind the value. `patch` holds overrides that the recipe accepts.
    `set` holds the changes that the recipe asks for at this alarm, in force from the next step on.
    """

    step: int
    id: str
    name: str
    reading: str
    value: float
    baseline: float | None
    n: int
    rule: str
    action: str
    patch: list[str]
    set: dict[str, float] = field(default_factory=dict)

    def to_row(self) -> dict[str, Any]:
        """Return the alarm as JSON data."""
        return asdict(self)

    def describe(self) -> str:
        """Return the alarm as one line for people."""
        baseline = "" if self.baseline is None else f" (baseline {self.baseline:.3g})"
        changes = "".join(f"; {path} becomes {value:g}" for path, value in self.set.items())
        advice = f"; try {' '.join(self.patch)}" if self.patch else ""
        return (
            f"{self.id} {self.name} ({self.action}) at step {self.step}: "
            f"{self.reading} {self.value:.3g}{baseline}; rule: {self.rule}{changes}{advice}"
        )


@dataclass(slots=True)
class _MonitorState:
    """The steps in a row that broke a monitor's rule, and the last action that it called for."""

    broken_steps: int = 0
    escalated_steps: int = 0
    action: str | None = None


class Watch:
    """Compute each step's readings and raise alarms from them.

    Replaying the rows of metrics.jsonl after a resume restores the same state and gives the same
    alarms.
    """

    def __init__(
        self,
        recipe: Mapping[str, Any],
        settings: Mapping[str, MonitorSettings],
        accepts: Accepts | None = None,
    ) -> None:
        self._recipe = recipe
        self._facts = RecipeFacts.of(recipe)
        self._settings = settings
        self._accepts = accepts or (lambda overrides: True)
        self._history = History()
        # A monitor of another package is active if the recipe names it.
        self._monitors = {name: find_monitor(name) for name in [*MONITORS, *settings]}
        self._states = {name: _MonitorState() for name in self._monitors}
        self._numbers: dict[str, float] = {}

    def read(self, result: StepResult, also: Mapping[str, float] | None = None) -> StepResult:
        """Add the readings of a step, and of an evaluation after it, to the step's metrics."""
        readings = compute_readings(result, self._history, self._facts)
        return replace(result, metrics={**result.metrics, **readings, **(also or {})})

    def judge(self, step: int, metrics: Metrics) -> list[Alarm]:
        """Return the alarms of a step from its metrics with readings, in the order of the table."""
        # Exclude seconds, because they differ between two runs of one recipe and alarms must not.
        # Also exclude numbers that are not finite, because metrics.jsonl has null for them and a
        # replay only reads that file.
        row = {
            name: value
            for name, value in metrics.items()
            if not name.startswith("seconds_")
            and isinstance(value, int | float)
            and math.isfinite(value)
        }
        self._history.add(row)
        view = StepView(step, row, self._history, self._facts)
        alarms = [self._judge(name, monitor, view) for name, monitor in self._monitors.items()]
        return [alarm for alarm in alarms if alarm is not None]

    def replay(self, rows: Iterable[Mapping[str, Any]]) -> list[Alarm]:
        """Judge the rows of metrics.jsonl again, which gives the same alarms."""
        alarms = []
        for row in rows:
            metrics = {name: value for name, value in row.items() if name != "step"}
            alarms += self.judge(row["step"], metrics)
        return alarms

    def _judge(self, name: str, monitor: Monitor, view: StepView) -> Alarm | None:
        settings = self._settings.get(name, MonitorSettings())
        if (settings.action or monitor.action) == "off":
            return None
        limits = Thresholds(
            monitor.level if settings.level is None else settings.level,
            monitor.change if settings.change is None else settings.change,
        )
        result = call_part(monitor.judge, f"monitors.{name}", lambda: monitor.judge(view, limits))
        if result is None:
            return None
        persistence = settings.persistence or monitor.persistence
        action = self._call(name, settings.action, persistence, result.score)
        if action is None:
            return None
        rule = monitor.rule_text.format(level=limits.level, change=limits.change)
        unit = "evaluations" if result.reading.startswith(HELDOUT) else "steps"
        return Alarm(
            step=view.step,
            id=monitor.id,
            name=monitor.name,
            reading=result.reading,
            value=round_digits(result.value),
            baseline=None if result.baseline is None else round_digits(result.baseline),
            n=int(view.row.get("rollouts", 0)),
            rule=f"{rule}, in {persistence} {unit} in a row" if persistence > 1 else rule,
            action=action,
            patch=self._patch(monitor, result.patch),
            set=self._change_numbers(settings.set),
        )

    def _call(self, name: str, chosen: str | None, persistence: int, score: float) -> str | None:
        """Return the action that a score calls for at this step, or None.

        A `chosen` action replaces the monitor's own and its escalation.
        """
        state = self._states[name]
        monitor = self._monitors[name]
        escalation = monitor.escalation if chosen is None else None
        is_escalated = escalation is not None and score >= escalation[0]
        state.broken_steps = state.broken_steps + 1 if score >= 1.0 else 0
        state.escalated_steps = state.escalated_steps + 1 if is_escalated else 0
        if score < RECOVERED_BELOW:
            state.action = None
        action = chosen or monitor.action
        if escalation is not None and state.escalated_steps >= persistence:
            action = escalation[1]
        # An alarm is not repeated while its trouble lasts, unless it becomes more severe.
        is_repeated = state.action and ACTIONS.index(state.action) >= ACTIONS.index(action)
        if state.broken_steps < persistence or is_repeated:
            return None
        state.action = action
        return action

    def _patch(self, monitor: Monitor, cause: Patch | None = None) -> list[str]:
        """Return the first patch that the recipe accepts; the patch of a known cause comes first."""
        for patch in filter(None, (cause, *monitor.patches)):
            changes = patch(self._recipe) or {}
            overrides = [
                f"{path}={value if isinstance(value, str) else json.dumps(value)}"
                for path, value in changes.items()
            ]
            if overrides and self._accepts(overrides):
                return overrides
        return []

    def _change_numbers(self, changes: Mapping[str, float | str]) -> dict[str, float]:
        """Return the new values of numbers of the recipe; factors apply to the current values."""
        for path, change in changes.items():
            current = self._numbers.get(path, read_number(self._recipe, path))
            factor = parse_factor(change)
            number = float(change) if factor is None else current * factor
            self._numbers[path] = round_digits(number)
        return {path: self._numbers[path] for path in changes}


def read_number(recipe: Mapping[str, Any], path: str) -> float:
    """Return the number at a dotted path of a resolved recipe; raises KeyError if it is missing."""
    node: Any = recipe
    for key in path.split("."):
        node = node[int(key)] if isinstance(node, list) else node[key]
    if isinstance(node, bool) or not isinstance(node, int | float):
        raise KeyError(path)
    return float(node)


def find_worst_alarm(alarms: Sequence[Alarm]) -> Alarm | None:
    """Return the alarm with the most severe action, the first of several."""
    return max(alarms, key=lambda alarm: ACTIONS.index(alarm.action), default=None)
