"""The watch over a run: its readings, and the alarms that follow from the rows of metrics.jsonl and from nothing else."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from practicum.monitors.facts import RecipeFacts
from practicum.monitors.history import HELDOUT, History, StepView
from practicum.monitors.readings import compute_readings
from practicum.monitors.rules import RuleResult, Thresholds
from practicum.monitors.settings import ACTIONS, MonitorSettings, parse_factor
from practicum.monitors.table import MONITORS, Monitor
from practicum.training.loop import StepResult
from practicum.types import Metrics

RECOVERED_BELOW = 0.8
"""A monitor that has spoken is quiet until its score falls below this: a hysteresis of 20 %."""

Accepts = Callable[[Sequence[str]], bool]
"""Whether the recipe can be changed by these overrides, `key=value` each."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """One row of alarms.jsonl: what was found at a step, by which rule, what follows, and what could be written instead.

    `n` counts the completions behind the value. `patch` are overrides that the recipe takes; `set` are the changes that the
    recipe asked for in such a case, and that hold from the next step on.
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

    def row(self) -> dict[str, Any]:
        """The alarm as JSON data."""
        return asdict(self)

    def line(self) -> str:
        """The alarm as one line for people."""
        base = "" if self.baseline is None else f" (baseline {self.baseline:.3g})"
        changed = "".join(f"; {path} becomes {value:g}" for path, value in self.set.items())
        tried = f"; try {' '.join(self.patch)}" if self.patch else ""
        return (
            f"{self.id} {self.name} ({self.action}) at step {self.step}: {self.reading} {self.value:.3g}{base}; "
            f"rule: {self.rule}{changed}{tried}"
        )

    @property
    def severity(self) -> int:
        """How grave its action is."""
        return ACTIONS.index(self.action)


@dataclass(slots=True)
class _State:
    """Where one monitor stands: steps in a row that broke its rule, and the graver one, and the action that it has called for."""

    hits: int = 0
    worse: int = 0
    called: str | None = None


class Watch:
    """Reads each step, judges it, and comes back to the same place when the rows of an interrupted run are replayed."""

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
        self._states = {name: _State() for name in MONITORS}
        self._numbers: dict[str, float] = {}

    def read(self, result: StepResult, also: Mapping[str, float] | None = None) -> StepResult:
        """The step with its readings, and those of an evaluation after it, among its metrics."""
        readings = compute_readings(result, self._history, self._facts)
        return replace(result, metrics={**result.metrics, **readings, **(also or {})})

    def judge(self, step: int, metrics: Metrics) -> list[Alarm]:
        """The alarms of a step whose metrics hold its readings, in the order of the table; seconds are not looked at."""
        row = {
            name: value
            for name, value in metrics.items()
            if not name.startswith("seconds_")
            and isinstance(value, int | float)
            and math.isfinite(value)
        }
        self._history.add(row)
        seen = StepView(step, row, self._history, self._facts)
        found = [self._judge(monitor, seen) for monitor in MONITORS.values()]
        return [alarm for alarm in found if alarm is not None]

    def replay(self, rows: Iterable[Mapping[str, Any]]) -> list[Alarm]:
        """Judge the rows of metrics.jsonl again, which gives the same alarms."""
        return [
            alarm
            for row in rows
            for alarm in self.judge(
                row["step"], {name: value for name, value in row.items() if name != "step"}
            )
        ]

    def _judge(self, monitor: Monitor, seen: StepView) -> Alarm | None:
        own = self._settings.get(monitor.id, MonitorSettings())
        action = own.action or monitor.action
        if action == "off":
            return None
        limits = Thresholds(
            monitor.level if own.level is None else own.level,
            monitor.change if own.change is None else own.change,
        )
        finding = monitor.judge(seen, limits)
        if finding is None:
            return None
        worse = monitor.worse if own.action is None else None
        call = self._call(
            self._states[monitor.id], finding, own.persistence or monitor.persistence, action, worse
        )
        if call is None:
            return None
        rule = f"{monitor.says.format(level=limits.level, change=limits.change)}{_times(own, monitor, finding)}"
        return Alarm(
            step=seen.step,
            id=monitor.id,
            name=monitor.name,
            reading=finding.reading,
            value=_digits(finding.value),
            baseline=None if finding.baseline is None else _digits(finding.baseline),
            n=int(seen.row.get("rollouts", 0)),
            rule=rule,
            action=call,
            patch=self._patch(monitor),
            set=self._changed(own.set),
        )

    @staticmethod
    def _call(
        state: _State,
        finding: RuleResult,
        persistence: int,
        action: str,
        worse: tuple[float, str] | None,
    ) -> str | None:
        """What a finding calls for now, or None; what has been called for once is only called for again when it was over."""
        state.hits = state.hits + 1 if finding.score >= 1.0 else 0
        state.worse = state.worse + 1 if worse is not None and finding.score >= worse[0] else 0
        if finding.score < RECOVERED_BELOW:
            state.called = None
        wanted = worse[1] if worse is not None and state.worse >= persistence else action
        if state.hits < persistence or (
            state.called and ACTIONS.index(state.called) >= ACTIONS.index(wanted)
        ):
            return None
        state.called = wanted
        return wanted

    def _patch(self, monitor: Monitor) -> list[str]:
        """The first of the monitor's patches that changes the recipe and that it takes, as overrides."""
        for patch in monitor.patches:
            changes = patch(self._recipe)
            overrides = [f"{path}={_word(value)}" for path, value in (changes or {}).items()]
            if overrides and self._accepts(overrides):
                return overrides
        return []

    def _changed(self, changes: Mapping[str, float | str]) -> dict[str, float]:
        """The numbers that changes come to, each from where it stands now."""
        for path, change in changes.items():
            times = parse_factor(change)
            base = self._numbers.get(path)
            base = number_at(self._recipe, path) if base is None else base
            self._numbers[path] = _digits(float(change) if times is None else base * times)
        return {path: self._numbers[path] for path in changes}


def number_at(recipe: Mapping[str, Any], path: str) -> float:
    """A number of a resolved recipe by its place; KeyError where there is none."""
    place: Any = recipe
    for key in path.split("."):
        place = place[int(key)] if isinstance(place, list) else place[key]
    if isinstance(place, bool) or not isinstance(place, int | float):
        raise KeyError(path)
    return float(place)


def find_worst_alarm(alarms: Sequence[Alarm]) -> Alarm | None:
    """The alarm with the gravest action, the first of several."""
    return max(alarms, key=lambda alarm: alarm.severity, default=None)


def _times(own: MonitorSettings, monitor: Monitor, finding: RuleResult) -> str:
    times = own.persistence or monitor.persistence
    what = "evaluations" if finding.reading.startswith(HELDOUT) else "steps"
    return f", in {times} {what} in a row" if times > 1 else ""


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _digits(value: float) -> float:
    return float(f"{value:.6g}")
