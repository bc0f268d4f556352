"""What a run has measured so far, as far back as its monitors look: a fold over the rows of metrics.jsonl."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from practicum.monitors.facts import RecipeFacts

BASELINE, REACH = 10, 64
"""A baseline is the median of the first 10 values of a reading; at most the 64 newest rows are looked at."""

HELDOUT = "heldout_"
"""Readings of evaluations, which are few: the first alone is their baseline, and all of them are kept."""


class History:
    """The first values of each reading and the newest rows."""

    def __init__(self) -> None:
        self.steps = 0
        self.rollouts = 0.0
        self._first: dict[str, list[float]] = {}
        self._rows: deque[Mapping[str, float]] = deque(maxlen=REACH)
        self._evaluations: list[Mapping[str, float]] = []

    def add(self, row: Mapping[str, float]) -> None:
        """Take in the row of a step."""
        self.steps += 1
        self.rollouts += row.get("rollouts", 0.0)
        self._rows.append(row)
        evaluated = {name: value for name, value in row.items() if name.startswith(HELDOUT)}
        if evaluated:
            self._evaluations.append(evaluated)
        for name, value in row.items():
            first = self._first.setdefault(name, [])
            if len(first) < _needed(name):
                first.append(value)

    def baseline(self, name: str) -> float | None:
        """The median of the first values of a reading, or None until all of them are there."""
        first = self._first.get(name, [])
        return median(first) if len(first) == _needed(name) else None

    def last(self, name: str, count: int) -> list[float]:
        """The newest values of a reading, oldest first, at most `count`; steps that lack it are passed over."""
        found = [row[name] for row in self._rows if name in row]
        return found[-count:]

    def first(self, name: str, count: int) -> list[float]:
        """The first values of a reading, as far as they are there: at most as many as a baseline has."""
        return self._first.get(name, [])[:count]

    def evaluations(self, name: str) -> list[float]:
        """All values of a reading of evaluations, oldest first, however many steps ago."""
        return [found[name] for found in self._evaluations if name in found]

    def rows(self, count: int) -> list[Mapping[str, float]]:
        """The newest rows, oldest first."""
        return list(self._rows)[-count:]

    def usual(self, name: str) -> float | None:
        """The median of all values within reach."""
        found = self.last(name, REACH)
        return median(found) if found else None

    def names(self, prefix: str) -> list[str]:
        """The readings of the newest row whose names begin so."""
        return [name for name in (self._rows[-1] if self._rows else ()) if name.startswith(prefix)]


@dataclass(frozen=True, slots=True)
class StepView:
    """What a monitor looks at: the row of a step, and everything up to and including it."""

    step: int
    row: Mapping[str, float]
    history: History
    facts: RecipeFacts

    def now(self, *names: str) -> list[float] | None:
        """The step's values of these readings, or None where one is missing."""
        return (
            [self.row[name] for name in names] if all(name in self.row for name in names) else None
        )

    def smooth(self, name: str, count: int = 3) -> float | None:
        """The median of the newest values, the step's own among them, or None where the step has none."""
        return median(self.history.last(name, count)) if name in self.row else None

    def baseline(self, name: str) -> float | None:
        """The run's own beginning, once it is over."""
        return (
            self.history.baseline(name)
            if self.step > BASELINE or name.startswith(HELDOUT)
            else None
        )

    def last(self, name: str, count: int) -> Sequence[float]:
        """The newest values, the step's own last."""
        return self.history.last(name, count)


def _needed(name: str) -> int:
    return 1 if name.startswith(HELDOUT) else BASELINE
