"""Decide when a run ends: after its last step, by a monitor, by its budget, or by a signal."""

from practicum.costs import BudgetTracker
from practicum.monitors import Alarm
from practicum.recipe import TrainConfig
from practicum.report.tables import BUDGET_SPENT, FINISHED_BY
from practicum.run_dir import RunDir, read_rows, shapes
from practicum.runs.records import locate_timings


class Ending:
    """The conditions that end a run. `signal` is the number of a signal that arrived, or None."""

    def __init__(self, train: TrainConfig) -> None:
        self.steps = train.steps
        self.spending = BudgetTracker()
        self.signal: int | None = None
        self._budget = train.budget
        self._finish: Alarm | None = None

    def recall_spending(self, run_dir: RunDir) -> None:
        """Count the spending of the steps before a resume, from their rows."""
        shape_of = {run_dir.metrics_jsonl: shapes.METRICS, locate_timings(run_dir): shapes.TIMINGS}
        for path, shape in shape_of.items():
            for row in read_rows(path, shape) if path.is_file() else ():
                self.spending.add(row)

    def finish_by(self, alarm: Alarm) -> bool:
        """Return True if the alarm ends the run early; the first such alarm is the reason."""
        finishes = alarm.action == "finish" and alarm.step < self.steps
        if finishes and self._finish is None:
            self._finish = alarm
        return finishes

    @property
    def reason(self) -> str | None:
        """Return why the run ends early, or None.

        The next step is assumed to cost as much as the most expensive of the last ones.
        """
        if self._finish is not None:
            return f"{FINISHED_BY} {self._finish.id} {self._finish.name}"
        if self._budget is None:
            return None
        exceeded = self._budget.find_exceeded(self.spending.totals, self.spending.next_step)
        return None if exceeded is None else f"{BUDGET_SPENT}: no further step fits its {exceeded}"

    def is_last(self, step: int) -> bool:
        """Return True if the run is complete after this step. A signal only interrupts it."""
        return step == self.steps or self.reason is not None
