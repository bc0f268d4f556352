"""Results of a reproduction: numbers by arm, measure and seed, and curves over the spending."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from practicum.errors import DataError
from practicum.run_dir import read_json, write_json
from practicum.studies.compare import Point

Values = Mapping[int, float]
"""One number per seed."""

BySeed = Mapping[str, Mapping[int, Any]]
"""Anything per seed, by the name of a measure or of an arm."""

TEACHER = "teacher"
"""The arm of the teacher's own answers to the held-out prompts; they are the same at all times."""


def name_before(measure: str) -> str:
    """Return the name of a measure taken before the training."""
    return f"before/{measure}"


@dataclass(frozen=True, slots=True)
class Results:
    """All measurements of a reproduction."""

    name: str
    form: str
    """`quick` or `full`."""
    seeds: Sequence[int]
    readings: Mapping[str, Mapping[str, Values]]
    """Numbers at the end of each run, by arm, measure and seed."""
    curves: Mapping[str, Mapping[int, Sequence[Point]]] = field(default_factory=dict)
    """The accuracy during each run, by arm and seed."""
    alarms: Mapping[str, Mapping[int, Sequence[str]]] = field(default_factory=dict)
    """The monitors that raised an alarm in each run, by arm and seed."""
    tried: Sequence[Mapping[str, Any]] = ()
    """All settings of the sweep, with their mean scores, their accuracy by seed, and their alarms."""
    chosen: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The best settings of the sweep, by arm."""
    failed: Sequence[str] = ()
    """The runs that did not finish, each with the reason."""
    doctor: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The doctor's verdict on an arm's recipe before training, with its reasons."""
    seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    """The versions, the processor and the commit of the runs."""
    design: str = ""
    """`LoadedReproduction.digest_design` at the time of the runs."""

    def get_values(
        self, arm: str, measure: str, at: str | int = "end", among: Sequence[str] = ()
    ) -> dict[int, float]:
        """Return a measure of an arm by seed, taken `at` a time.

        `start` is before the training, and `equal_flops` is when the arm had spent as many FLOPs as
        the cheapest arm of `among` in total. At a step, or at equal FLOPs, the accuracy is
        interpolated. Raises DataError if the measure was not taken at that time.
        """
        readings = self.readings.get(arm, {})
        if at == "end" or arm == TEACHER:
            return dict(readings.get(measure, {}))
        if measure != "accuracy":
            return self._get_start(readings, measure, at)
        curves = self.curves.get(arm, {})
        if at == "start":
            return {seed: curve[0].accuracy for seed, curve in curves.items()}
        if isinstance(at, int):
            return {
                seed: _estimate_accuracy(curve, "steps", float(at))
                for seed, curve in curves.items()
            }
        return {
            seed: _estimate_accuracy(curve, "flops", self._find_least_flops(seed, (arm, *among)))
            for seed, curve in curves.items()
        }

    def _get_start(
        self, readings: Mapping[str, Values], measure: str, at: str | int
    ) -> dict[int, float]:
        if not readings:
            return {}
        if name_before(measure) not in readings:
            raise DataError(
                f"{self.name}: {measure} is only measured at the end of a run; set `at: end`"
            )
        if at != "start":
            raise DataError(
                f"{self.name}: {measure} is only measured at a run's start and end; "
                "set `at: start` or `at: end`"
            )
        return dict(readings[name_before(measure)])

    def _find_least_flops(self, seed: int, arms: Sequence[str]) -> float:
        curves = [self.curves.get(arm, {}).get(seed) for arm in arms]
        return min(curve[-1].spent["flops"] for curve in curves if curve)

    def get_spending_until(self, arm: str, level: float, unit: str) -> dict[int, float | None]:
        """Return each run's spending when its accuracy first reached a level, or None."""
        return {
            seed: next(
                (point.spent.get(unit, 0.0) for point in curve if point.accuracy >= level), None
            )
            for seed, curve in self.curves.get(arm, {}).items()
        }

    def get_total_spending(self, arm: str, unit: str) -> dict[int, float]:
        """Return each run's total spending."""
        return {
            seed: curve[-1].spent[unit] for seed, curve in self.curves.get(arm, {}).items() if curve
        }


def _estimate_accuracy(curve: Sequence[Point], unit: str, amount: float) -> float:
    """Return the accuracy at an amount of spending, linearly between the two nearest points."""
    previous = curve[0]
    for point in curve:
        end = point.spent.get(unit, 0.0)
        if end >= amount * (1 - 1e-9):
            start = previous.spent.get(unit, 0.0)
            share = 1.0 if end <= start else (amount - start) / (end - start)
            rise = point.accuracy - previous.accuracy
            return previous.accuracy + min(max(share, 0.0), 1.0) * rise
        previous = point
    return previous.accuracy


def join_results(first: Results, second: Results) -> Results:
    """Return the results of other seeds of one reproduction as one; the first have the sweep."""
    arms = {**first.readings, **second.readings}
    return replace(
        first,
        seeds=[*first.seeds, *second.seeds],
        readings={
            arm: _join(first.readings.get(arm, {}), second.readings.get(arm, {})) for arm in arms
        },
        curves=_join(first.curves, second.curves),
        alarms=_join(first.alarms, second.alarms),
        failed=[*first.failed, *second.failed],
        seconds=first.seconds + second.seconds,
        versions={
            name: ", ".join(dict.fromkeys(filter(None, (first.versions.get(name), version))))
            for name, version in second.versions.items()
        },
    )


def _join(first: BySeed, second: BySeed) -> dict[str, dict[int, Any]]:
    """Return the values of both by name and seed."""
    return {name: {**first.get(name, {}), **second.get(name, {})} for name in {**first, **second}}


def group_by_measure(by_seed: Mapping[int, Mapping[str, float]]) -> dict[str, dict[int, float]]:
    """Return readings by measure and seed instead of by seed and measure."""
    names = dict.fromkeys(name for values in by_seed.values() for name in values)
    return {
        name: {seed: values[name] for seed, values in by_seed.items() if name in values}
        for name in names
    }


def write_results(path: Path, results: Results) -> None:
    """Write the results as JSON."""
    write_json(path, asdict(results))


def read_results(path: Path) -> Results:
    """Read the file of `write_results`. Raises DataError if it is another file."""
    fields = read_json(path)
    try:
        readings = {
            arm: {measure: _parse_seeds(values) for measure, values in measures.items()}
            for arm, measures in fields["readings"].items()
        }
        curves = {
            arm: {int(seed): [Point(**point) for point in curve] for seed, curve in by_seed.items()}
            for arm, by_seed in fields["curves"].items()
        }
        alarms = {arm: _parse_seeds(values) for arm, values in fields["alarms"].items()}
        return Results(**{**fields, "readings": readings, "curves": curves, "alarms": alarms})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{path}: not the results of a reproduction ({error!r}); run python -m laboratory again"
        ) from None


def _parse_seeds(by_seed: Mapping[str, Any]) -> dict[int, Any]:
    """Return the mapping with integer keys; JSON has strings."""
    return {int(seed): value for seed, value in by_seed.items()}
