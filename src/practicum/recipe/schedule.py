"""Numbers that change as a run goes on: any number of a recipe's objective, rollout or optimizer may be a schedule.

A schedule is written in the number's place, `coefficient: linear(0.005, 0.001)`, also inside a call if it is named there,
`log_linear(teacher=1, student=linear(0.5, 0))`. What it is at a step depends on the step, and for `adaptive` on the metrics of
the steps before.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from practicum.core.calls import Call, bind, format_call, parse_call
from practicum.errors import NumericError

SCHEDULED = ("objective", "rollout", "optimizer")
"""The sections of a recipe whose numbers may change."""


class Linear(Call):
    """From `start` at the first step in a straight line to `end`, reached after `steps` (none: at the last step)."""

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
    """`before` up to step `at`, and `after` from then on."""

    type: Literal["switch"] = "switch"
    before: float
    after: float
    at: int = Field(ge=1)


class Adaptive(Call):
    """From `start` towards `end` by how a metric moves: TAID's rule (2501.16937, algorithm 1).

    Each step closes `rate * sigmoid(m)` of the way that is left, where m is the running mean (with `momentum`) of the
    metric's relative fall, or of its rise with `on` rising (DistiLLM 2402.03898).
    """

    type: Literal["adaptive"] = "adaptive"
    start: float
    end: float
    rate: float = Field(default=0.0005, gt=0, le=1)
    momentum: float = Field(default=0.99, ge=0, lt=1)
    metric: str = "loss"
    on: Literal["falling", "rising"] = "falling"


SCHEDULES: dict[str, type[Linear] | type[Cosine] | type[Switch] | type[Adaptive]] = {
    "linear": Linear,
    "cosine": Cosine,
    "switch": Switch,
    "adaptive": Adaptive,
}
"""Every schedule by name; a plain number is constant."""


def _read(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    name = parse_call(value)[0]
    if name not in SCHEDULES:
        raise ValueError(
            f"no schedule named {name!r}; known: {', '.join(SCHEDULES)}, or a plain number"
        )
    fields = [field for field in SCHEDULES[name].model_fields if field != "type"]
    return {"type": name, **bind("schedule", value, fields)}


Schedule = Annotated[
    Linear | Cosine | Switch | Adaptive, Field(discriminator="type"), BeforeValidator(_read)
]


def compute_value(schedule: Linear | Cosine | Switch | Adaptive, step: int, steps: int) -> float:
    """The number at a step counted from 1, as far as it is known beforehand: an adaptive one stands at its start."""
    if isinstance(schedule, Switch):
        return schedule.before if step <= schedule.at else schedule.after
    if isinstance(schedule, Adaptive):
        return schedule.start
    progress = min((step - 1) / max((schedule.steps or steps) - 1, 1), 1.0)
    if isinstance(schedule, Cosine):
        progress = 0.5 * (1.0 - math.cos(math.pi * progress))
    return schedule.start * (1.0 - progress) + schedule.end * progress


def depends_on_steps(schedule: Linear | Cosine | Switch | Adaptive) -> bool:
    """Tell whether a schedule is stretched over the whole run, so that another `train.steps` changes its numbers."""
    return isinstance(schedule, Linear | Cosine) and schedule.steps is None


class ScheduleState:
    """The schedules of one run, and where the adaptive ones stand; see `Adaptive`."""

    def __init__(
        self, schedules: Mapping[str, Linear | Cosine | Switch | Adaptive], steps: int
    ) -> None:
        self._schedules = schedules
        self._steps = steps
        self._changed: dict[str, float] = {}
        self._state = {
            path: {"value": schedule.start, "momentum": 0.0}
            for path, schedule in schedules.items()
            if isinstance(schedule, Adaptive)
        }

    def at(self, step: int) -> dict[str, float]:
        """Every scheduled number at a step, by its path."""
        numbers = {
            path: compute_value(schedule, step, self._steps)
            for path, schedule in self._schedules.items()
        }
        return (
            numbers | {path: state["value"] for path, state in self._state.items()} | self._changed
        )

    def change(self, numbers: Mapping[str, float]) -> None:
        """Let numbers be others from the next step on, whatever is planned."""
        self._changed.update(numbers)

    def after_step(self, metrics: Mapping[str, float]) -> None:
        """Let the adaptive schedules see what the step measured; NumericError where it did not measure their metric."""
        for path, state in self._state.items():
            schedule = self._schedules[path]
            assert isinstance(schedule, Adaptive)
            if schedule.metric not in metrics:
                if metrics.get("nonfinite") or metrics.get("skipped"):
                    continue
                raise NumericError(
                    f"{path} adapts to the metric {schedule.metric!r}, which this run does not measure; "
                    f"it measures: {', '.join(sorted(metrics))}"
                )
            self._move(schedule, state, metrics[schedule.metric])

    @staticmethod
    def _move(schedule: Adaptive, state: dict[str, float], measured: float) -> None:
        if "previous" in state:
            fall = (state["previous"] - measured) / (abs(state["previous"]) + 1e-12)
            change = fall if schedule.on == "falling" else -fall
            state["momentum"] = (
                schedule.momentum * state["momentum"] + (1.0 - schedule.momentum) * change
            )
            share = schedule.rate / (1.0 + math.exp(-max(min(state["momentum"], 50.0), -50.0)))
            state["value"] += share * (schedule.end - state["value"])
        state["previous"] = measured

    def save_state(self) -> dict[str, dict[str, float]]:
        """Where the adaptive schedules stand."""
        return {path: dict(state) for path, state in self._state.items()}

    def load_state(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Restore what `save_state` gave."""
        for path in self._state.keys() & state.keys():
            self._state[path] = dict(state[path])


def extract_schedules(data: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """A recipe's data with the first number in each schedule's place, and the schedules by path.

    A path names sections and places in lists, `objective.losses.0.target.student`.
    """
    schedules: dict[str, str] = {}
    plain = {
        key: _without(value, (key,), schedules) if key in SCHEDULED else value
        for key, value in data.items()
    }
    return plain, schedules


def apply_values(data: dict[str, Any], numbers: Mapping[str, float]) -> None:
    """Set the numbers at their paths in a recipe's resolved data, whole ones where whole ones stood."""
    for path, number in numbers.items():
        *parents, last = path.split(".")
        place: Any = data
        for name in parents:
            key: Any = int(name) if isinstance(place, list) else name
            place[key] = _opened(place[key])
            place = place[key]
        whole = isinstance(place.get(last), int) and not isinstance(place.get(last), bool)
        place[last] = round(number) if whole else number


def _opened(value: Any) -> Any:
    """A call's text as a mapping whose arguments can be set; anything else as it is."""
    if not isinstance(value, str):
        return value
    name, _, arguments = parse_call(value)
    return {"type": name, **arguments}


def _without(value: Any, path: tuple[str, ...], schedules: dict[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _without(inner, (*path, str(key)), schedules) for key, inner in value.items()}
    if isinstance(value, list):
        return [
            _without(inner, (*path, str(place)), schedules) for place, inner in enumerate(value)
        ]
    if not isinstance(value, str) or not any(f"{name}(" in value for name in SCHEDULES):
        return value
    name, positional, keywords = parse_call(value)
    if name in SCHEDULES:
        schedules[".".join(path)] = value
        return _first(value)
    arguments = {}
    for key, argument in [*((None, argument) for argument in positional), *keywords.items()]:
        nested = isinstance(argument, str) and any(
            argument.startswith(f"{known}(") for known in SCHEDULES
        )
        if nested and key is None:
            raise ValueError(
                f"{'.'.join(path)}: name the argument that {argument} stands for, as in {name}(NAME={argument})"
            )
        if nested:
            schedules[".".join((*path, str(key)))] = argument
            argument = _first(argument)
        arguments[key] = argument
    if None in arguments:
        raise ValueError(
            f"{'.'.join(path)}: name every argument of {name!r} where one of them is a schedule"
        )
    return format_call(name, {str(key): argument for key, argument in arguments.items()})


def _first(schedule: str) -> Any:
    """The number that a schedule begins with, in the type it was written in."""
    _, positional, keywords = parse_call(schedule)
    given: Sequence[Any] = positional or [keywords.get("start", keywords.get("before"))]
    if not isinstance(given[0], int | float):
        raise ValueError(f"{schedule} needs a number to begin with, for example linear(0.5, 0)")
    return given[0]


def tabulate_schedules(
    schedules: Mapping[str, Linear | Cosine | Switch | Adaptive], steps: int
) -> Iterator[tuple[str, list[float]]]:
    """Each schedule's number at every step, as far as it is known beforehand."""
    for path, schedule in schedules.items():
        yield path, [compute_value(schedule, step, steps) for step in range(1, steps + 1)]
