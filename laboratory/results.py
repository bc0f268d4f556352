"""What the runs of a reproduction came to: numbers by arm, measure and seed, and curves over what was spent."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from practicum.errors import DataError
from practicum.run_dir import read_json, write_json
from practicum.studies.compare import Point

Values = Mapping[int, float]
"""One number a seed."""

TEACHER = "teacher"
"""What tests call the teacher's own answers to the held-out prompts, beside the arms; it is at the start what it is at the end."""


def before(measure: str) -> str:
    """The name of a measure as it was before the training."""
    return f"before/{measure}"


@dataclass(frozen=True, slots=True)
class Results:
    """All that was measured. `tried` lists every setting of the sweep, also those that lost, with the monitors that spoke.

    `readings[arm][measure][seed]` is a number at the end of a run; `curves[arm][seed]` the accuracy on its way; `alarms` which
    monitors spoke in it; `failed` the runs that did not finish, with the reason; `doctor[arm]` the verdict on its
    recipe before any training, with the reasons.
    """

    name: str
    form: str
    seeds: Sequence[int]
    readings: Mapping[str, Mapping[str, Values]]
    curves: Mapping[str, Mapping[int, Sequence[Point]]] = field(default_factory=dict)
    alarms: Mapping[str, Mapping[int, Sequence[str]]] = field(default_factory=dict)
    tried: Sequence[Mapping[str, Any]] = ()
    chosen: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    failed: Sequence[str] = ()
    doctor: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)

    def values(
        self, arm: str, measure: str, at: str | int = "end", among: Sequence[str] = ()
    ) -> dict[int, float]:
        """A measure of an arm by seed, where it was taken.

        At the `start` it is the accuracy, in all or of a domain, before any training, at `equal_flops` that when the arm had
        spent what the thriftiest of `among` spent in all, and at a step the last one until then.
        """
        readings = self.readings.get(arm, {})
        if at == "end" or arm == TEACHER:
            return dict(readings.get(measure, {}))
        if measure != "accuracy":
            return self._at_start(readings, measure, at)
        curves = self.curves.get(arm, {})
        if at == "start":
            return {seed: curve[0].accuracy for seed, curve in curves.items()}
        if isinstance(at, int):
            return {seed: _at(curve, "steps", float(at)) for seed, curve in curves.items()}
        return {
            seed: _at(curve, "flops", self._least_flops(seed, (arm, *among)))
            for seed, curve in curves.items()
        }

    def _at_start(
        self, readings: Mapping[str, Values], measure: str, at: str | int
    ) -> dict[int, float]:
        """A measure before the training; DataError where it was not taken there, or is asked for on the way."""
        if not readings:
            return {}
        if before(measure) not in readings:
            raise DataError(
                f"{self.name}: {measure} is known at the end of a run alone; write at: end"
            )
        if at != "start":
            raise DataError(
                f"{self.name}: {measure} is known at a run's start and end alone; write at: start or at: end"
            )
        return dict(readings[before(measure)])

    def _least_flops(self, seed: int, among: Sequence[str]) -> float:
        ends = [
            self.curves[arm][seed][-1].spent["flops"]
            for arm in among
            if seed in self.curves.get(arm, {})
        ]
        return min(ends)

    def spent_until(self, arm: str, level: float, unit: str) -> dict[int, float | None]:
        """What each run had spent when its accuracy was first at a level; None where it never was."""
        found: dict[int, float | None] = {}
        for seed, curve in self.curves.get(arm, {}).items():
            there = [moment.spent.get(unit, 0.0) for moment in curve if moment.accuracy >= level]
            found[seed] = there[0] if there else None
        return found

    def spent(self, arm: str, unit: str) -> dict[int, float]:
        """What each run spent in all."""
        return {
            seed: curve[-1].spent[unit] for seed, curve in self.curves.get(arm, {}).items() if curve
        }


def _at(curve: Sequence[Point], unit: str, amount: float) -> float:
    """The accuracy at an amount spent, on the straight line between the moments around it."""
    before = curve[0]
    for moment in curve:
        here = moment.spent.get(unit, 0.0)
        if here >= amount * (1 - 1e-9):
            start = before.spent.get(unit, 0.0)
            share = 1.0 if here <= start else (amount - start) / (here - start)
            return before.accuracy + min(max(share, 0.0), 1.0) * (moment.accuracy - before.accuracy)
        before = moment
    return before.accuracy


def by_measure(by_seed: Mapping[int, Mapping[str, float]]) -> dict[str, dict[int, float]]:
    """Return readings by measure and seed instead of by seed and measure."""
    names = dict.fromkeys(name for values in by_seed.values() for name in values)
    return {
        name: {seed: values[name] for seed, values in by_seed.items() if name in values}
        for name in names
    }


def write_results(path: Path, results: Results) -> None:
    """Write them as JSON."""
    write_json(path, asdict(results))


def read_results(path: Path) -> Results:
    """Read back what was written; DataError where it is something else."""
    data = read_json(path)
    try:
        readings = {
            arm: {measure: _by_seed(values) for measure, values in measures.items()}
            for arm, measures in data["readings"].items()
        }
        curves = {
            arm: {int(seed): [Point(**point) for point in curve] for seed, curve in by_seed.items()}
            for arm, by_seed in data["curves"].items()
        }
        alarms = {arm: _by_seed(values) for arm, values in data["alarms"].items()}
        return Results(**{**data, "readings": readings, "curves": curves, "alarms": alarms})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{path}: not the results of a reproduction ({error!r}); run python -m laboratory again"
        ) from None


def _by_seed(values: Mapping[str, Any]) -> dict[int, Any]:
    return {int(seed): value for seed, value in values.items()}
