"""Schedules: numbers of a recipe's objective, rollout or optimizer that change during a run.

A schedule replaces the number, `coefficient: linear(0.005, 0.001)`, or as a named argument
of a call, `log_linear(teacher=1, student=linear(0.5, 0))`. Its value depends on the step, and for
`adaptive`, `staircase` and `first` on the metrics of earlier steps.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from practicum.core.calls import Call, bind, format_call, parse_call
from practicum.errors import NumericError

SCHEDULED = ("objective", "rollout", "optimizer")
"""The sections of a recipe with numbers that may change."""

HELDOUT = "heldout_"
"""The beginning of the metrics that only steps with an evaluation have."""


class Linear(Call):
    """From `start` at the first step linearly to `end`, after `steps` (none: the whole run)."""

    type: Literal["linear"] = "linear"
    start: float
    end: float
    steps: int | None = Field(default=None, ge=1)


class Cosine(Call):
    """From `start` to `end` along half a cosine, over `steps` (none: the whole run)."""

    type: Literal["cosine"] = "cosine"
    start: float
    end: float
    steps: int | None = Field(default=None, ge=1)


class Switch(Call):
    """The number `before` up to step `at`, and `after` from the next step on."""

    type: Literal["switch"] = "switch"
    before: float
    after: float
    at: int = Field(ge=1)


class Adaptive(Call):
    """From `start` towards `end` as a metric moves: TAID's rule (2501.16937, algorithm 1).

    Each step covers `rate * sigmoid(m)` of the remaining distance. m is the running mean (with
    `momentum`) of the metric's relative fall, or with `on` rising of its rise.
    """

    type: Literal["adaptive"] = "adaptive"
    start: float
    end: float
    rate: float = Field(default=0.0005, gt=0, le=1)
    momentum: float = Field(default=0.99, ge=0, lt=1)
    metric: str = "loss"
    on: Literal["falling", "rising"] = "falling"

    def move(self, state: dict[str, float], measured: float) -> None:
        """Move the value in `state` by a new measurement."""
        if "previous" in state:
            fall = (state["previous"] - measured) / (abs(state["previous"]) + 1e-12)
            change = fall if self.on == "falling" else -fall
            state["momentum"] = self.momentum * state["momentum"] + (1.0 - self.momentum) * change
            # The sigmoid is saturated at 50; larger momenta would overflow `exp`.
            share = self.rate / (1.0 + math.exp(-max(min(state["momentum"], 50.0), -50.0)))
            state["value"] += share * (self.end - state["value"])
        state["previous"] = measured


class Staircase(Call):
    """From `start` towards `end`: by `by` whenever a metric is at least `tolerance` above its value at
    the last move, or at its first measurement (DistiLLM 2402.03898).
    """

    type: Literal["staircase"] = "staircase"
    start: float
    end: float
    by: float = Field(default=0.1, gt=0)
    metric: str = "heldout_reverse_kl"
    tolerance: float = 0.0

    def move(self, state: dict[str, float], measured: float) -> None:
        """Move the value in `state` by a new measurement."""
        if "previous" not in state:
            state["previous"] = measured
        elif measured >= state["previous"] + self.tolerance:
            distance = self.end - state["value"]
            state["value"] += math.copysign(min(self.by, abs(distance)), distance)
            state["previous"] = measured


class First(Call):
    """The number `start` until a metric is measured, and its first measurement from then on."""

    type: Literal["first"] = "first"
    start: float
    metric: str

    def move(self, state: dict[str, float], measured: float) -> None:
        """Set the value in `state` to the first measurement."""
        if "previous" not in state:
            state["value"] = state["previous"] = measured


Following = Adaptive | Staircase | First
"""The schedules that follow a metric of earlier steps."""

AnySchedule = Linear | Cosine | Switch | Following

SCHEDULES = {
    "linear": Linear,
    "cosine": Cosine,
    "switch": Switch,
    "adaptive": Adaptive,
    "staircase": Staircase,
    "first": First,
}
"""The schedules by name; a plain number is constant."""

_CALLS_SCHEDULE = re.compile(rf"\b(?:{'|'.join(SCHEDULES)})\(")


def _parse_schedule(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    name = parse_call(text)[0]
    if name not in SCHEDULES:
        raise ValueError(
            f"no schedule named {name!r}; known: {', '.join(SCHEDULES)}, or a plain number"
        )
    fields = [field for field in SCHEDULES[name].model_fields if field != "type"]
    return {"type": name, **bind("schedule", text, fields)}


Schedule = Annotated[AnySchedule, Field(discriminator="type"), BeforeValidator(_parse_schedule)]


def compute_value(schedule: AnySchedule, step: int, steps: int) -> float:
    """Return the number at a step, counted from 1; one that follows a metric has its start value."""
    if isinstance(schedule, Switch):
        return schedule.before if step <= schedule.at else schedule.after
    if isinstance(schedule, Following):
        return schedule.start
    progress = min((step - 1) / max((schedule.steps or steps) - 1, 1), 1.0)
    if isinstance(schedule, Cosine):
        progress = 0.5 * (1.0 - math.cos(math.pi * progress))
    return schedule.start * (1.0 - progress) + schedule.end * progress


def needs_run_length(schedule: AnySchedule) -> bool:
    """Return True if the schedule spans the whole run, so that its numbers need `train.steps`."""
    return isinstance(schedule, Linear | Cosine) and schedule.steps is None


class ScheduleState:
    """The schedules of one run, with the current values of the adaptive ones."""

    def __init__(self, schedules: Mapping[str, AnySchedule], steps: int) -> None:
        self._schedules = schedules
        self._steps = steps
        self._changed: dict[str, float] = {}
        self._state = {
            path: {"value": schedule.start, "momentum": 0.0}
            for path, schedule in schedules.items()
            if isinstance(schedule, Following)
        }

    def compute_numbers(self, step: int) -> dict[str, float]:
        """Return every scheduled number at a step, by path."""
        planned = {
            path: compute_value(schedule, step, self._steps)
            for path, schedule in self._schedules.items()
        }
        adapted = {path: state["value"] for path, state in self._state.items()}
        return planned | adapted | self._changed

    def change(self, numbers: Mapping[str, float]) -> None:
        """Override scheduled numbers from the next step on, by path."""
        self._changed.update(numbers)

    def update(self, metrics: Mapping[str, float]) -> None:
        """Move the adaptive schedules by the metrics of a step.

        Raises NumericError if a schedule's metric was never measured, unless the step was skipped.
        """
        for path, state in self._state.items():
            schedule = self._schedules[path]
            assert isinstance(schedule, Following)
            if schedule.metric not in metrics:
                # A step without an evaluation, or without an answer by one of the writers, has none
                # of their metrics.
                is_due = any(name.startswith(HELDOUT) for name in metrics)
                is_later = schedule.metric.startswith(HELDOUT) and not is_due
                is_known = is_later or "previous" in state
                if is_known or metrics.get("nonfinite") or metrics.get("skipped"):
                    continue
                raise NumericError(
                    f"{path} adapts to the metric {schedule.metric!r}, which this run does not "
                    f"measure; it measures: {', '.join(sorted(metrics))}"
                )
            schedule.move(state, metrics[schedule.metric])

    def save_state(self) -> dict[str, dict[str, float]]:
        """Return the values of the adaptive schedules, by path."""
        return {path: dict(state) for path, state in self._state.items()}

    def load_state(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Restore the values that `save_state` returned."""
        # A resume may change schedules; only schedules that the saved run also had are restored.
        for path in self._state.keys() & state.keys():
            self._state[path] = dict(state[path])


def extract_schedules(recipe_data: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a recipe's data with each schedule replaced by its first number, and the schedules.

    The schedules are keyed by path: sections and list indices, `objective.losses.0.target.student`.
    """
    schedules: dict[str, str] = {}
    plain = {
        key: _replace_schedules(section, (key,), schedules) if key in SCHEDULED else section
        for key, section in recipe_data.items()
    }
    return plain, schedules


def apply_values(recipe_data: dict[str, Any], numbers: Mapping[str, float]) -> None:
    """Set numbers at their paths in a recipe's resolved data; integers stay integers."""
    for path, number in numbers.items():
        *parents, last = path.split(".")
        section: Any = recipe_data
        for name in parents:
            key: Any = int(name) if isinstance(section, list) else name
            if isinstance(section[key], str):
                # A call as text: its arguments can be set in a mapping.
                call, _, arguments = parse_call(section[key])
                section[key] = {"type": call, **arguments}
            section = section[key]
        # Python counts True and False as integers.
        is_integer = isinstance(section.get(last), int) and not isinstance(section.get(last), bool)
        section[last] = round(number) if is_integer else number


def _replace_schedules(node: Any, path: tuple[str, ...], schedules: dict[str, str]) -> Any:
    """Return the YAML node with schedules replaced by first numbers; add them to `schedules`."""
    if isinstance(node, Mapping):
        return {
            key: _replace_schedules(inner, (*path, str(key)), schedules)
            for key, inner in node.items()
        }
    if isinstance(node, list):
        return [
            _replace_schedules(inner, (*path, str(index)), schedules)
            for index, inner in enumerate(node)
        ]
    if not isinstance(node, str) or not _CALLS_SCHEDULE.search(node):
        return node
    name, positional, keywords = parse_call(node)
    if name in SCHEDULES:
        schedules[".".join(path)] = node
        return _read_first_number(node)
    # A schedule within a call needs a name: its path ends in the argument's name.
    for argument in filter(_is_schedule, positional):
        raise ValueError(
            f"{'.'.join(path)}: name the argument that {argument} stands for, "
            f"as in {name}(NAME={argument})"
        )
    if positional:
        raise ValueError(
            f"{'.'.join(path)}: name every argument of {name!r} where one of them is a schedule"
        )
    nested = {key: argument for key, argument in keywords.items() if _is_schedule(argument)}
    schedules |= {".".join((*path, key)): argument for key, argument in nested.items()}
    first = {key: _read_first_number(argument) for key, argument in nested.items()}
    return format_call(name, keywords | first)


def _is_schedule(argument: Any) -> bool:
    return isinstance(argument, str) and argument.startswith(
        tuple(f"{name}(" for name in SCHEDULES)
    )


def _read_first_number(schedule: str) -> Any:
    """Return the first number of a schedule, with the type in which the recipe writes it."""
    _, positional, keywords = parse_call(schedule)
    number = positional[0] if positional else keywords.get("start", keywords.get("before"))
    if not isinstance(number, int | float):
        raise ValueError(f"{schedule} needs a number to begin with, for example linear(0.5, 0)")
    return number


def evaluate_schedules(
    schedules: Mapping[str, AnySchedule], steps: int
) -> Iterator[tuple[str, list[float]]]:
    """Yield each schedule's path and its number at every step; adaptive ones stay at the start."""
    for path, schedule in schedules.items():
        yield path, [compute_value(schedule, step, steps) for step in range(1, steps + 1)]
