"""Remember a run's rows of metrics.jsonl, as far back as its monitors look."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from practicum.monitors.facts import RecipeFacts

BASELINE_VALUES, MAX_ROWS = 10, 64
"""A baseline is the median of a reading's first 10 values; the 64 newest rows are remembered."""

HELDOUT = "heldout_"
"""The prefix of evaluation readings. They are few: all are remembered, the first is a baseline."""


class History:
    """The first values of each reading and the newest rows."""

    def __init__(self) -> None:
        self.steps = 0
        self.rollouts = 0.0
        self._first: dict[str, list[float]] = {}
        self._rows: deque[Mapping[str, float]] = deque(maxlen=MAX_ROWS)
        self._evaluations: list[Mapping[str, float]] = []

    def add(self, row: Mapping[str, float]) -> None:
        """Add the row of a step."""
        self.steps += 1
        self.rollouts += row.get("rollouts", 0.0)
        self._rows.append(row)
        # Evaluations may be further apart than the number of stored rows.
        evaluation = {name: value for name, value in row.items() if name.startswith(HELDOUT)}
        if evaluation:
            self._evaluations.append(evaluation)
        for name, value in row.items():
            first = self._first.setdefault(name, [])
            if len(first) < _count_baseline_values(name):
                first.append(value)

    def get_baseline(self, name: str) -> float | None:
        """Return the median of a reading's first values, or None until all of them are there."""
        first = self._first.get(name, [])
        return median(first) if len(first) == _count_baseline_values(name) else None

    def get_last(self, name: str, count: int) -> list[float]:
        """Return up to `count` newest values, oldest first, of the steps with the reading."""
        return [row[name] for row in self._rows if name in row][-count:]

    def get_first(self, name: str, count: int) -> list[float]:
        """Return up to `count` first values of a reading, limited to the size of its baseline."""
        return self._first.get(name, [])[:count]

    def get_evaluations(self, name: str) -> list[float]:
        """Return every value of an evaluation reading, oldest first, however many steps ago."""
        return [evaluation[name] for evaluation in self._evaluations if name in evaluation]

    def get_rows(self, count: int) -> list[Mapping[str, float]]:
        """Return the newest rows, oldest first."""
        return list(self._rows)[-count:]

    def compute_median(self, name: str) -> float | None:
        """Return the median over all stored rows, or None if no row has the reading."""
        values = self.get_last(name, MAX_ROWS)
        return median(values) if values else None

    def list_names(self, prefix: str) -> list[str]:
        """List the readings of the newest row with names that start with `prefix`."""
        return [name for name in (self._rows[-1] if self._rows else ()) if name.startswith(prefix)]


@dataclass(frozen=True, slots=True)
class StepView:
    """A step as a rule sees it: its row, and the history up to and including it."""

    step: int
    row: Mapping[str, float]
    history: History
    facts: RecipeFacts

    def get_all(self, *names: str) -> list[float] | None:
        """Return the step's values of these readings, or None if one is missing."""
        values = [self.row[name] for name in names if name in self.row]
        return values if len(values) == len(names) else None

    def smooth(self, name: str, count: int = 3) -> float | None:
        """Return the median of the newest values, or None if this step has none."""
        return median(self.get_last(name, count)) if name in self.row else None

    def get_baseline(self, name: str) -> float | None:
        """Return the baseline of a reading, or None during the steps that it is taken from."""
        has_baseline = self.step > BASELINE_VALUES or name.startswith(HELDOUT)
        return self.history.get_baseline(name) if has_baseline else None

    @property
    def is_approaching(self) -> bool:
        """True if the student is nearer to its teacher than in the first steps, by a tenth or more."""
        start, divergence = self.history.get_first("reverse_kl", 3), self.smooth("reverse_kl", 5)
        return divergence is not None and divergence < 0.9 * median(start)

    @property
    def is_leaving(self) -> bool:
        """True if the student is twice as far from its teacher as in the first steps, without rewards."""
        divergence = self.smooth("reverse_kl")
        has_moved = divergence is not None and divergence > 2.0 * self.start_divergence
        return has_moved and not self.facts.has_rewards

    @property
    def start_divergence(self) -> float:
        """The mean divergence of the first two steps, unless the first update has ruined the second."""
        start = self.history.get_first("reverse_kl", 2)
        return min(fmean(start), 1.5 * max(start[0], 0.0))

    def get_last(self, name: str, count: int) -> Sequence[float]:
        """Return the newest values of a reading, this step's last."""
        return self.history.get_last(name, count)


def _count_baseline_values(name: str) -> int:
    return 1 if name.startswith(HELDOUT) else BASELINE_VALUES
