"""The end of a run: its last step, a monitor that finishes it, a budget that pays no further step, or a signal."""

from practicum.costs import BudgetTracker
from practicum.monitors import Alarm
from practicum.recipe import TrainConfig
from practicum.report.tables import FINISHED, SPENT
from practicum.run_dir import RunDir, read_rows, shapes
from practicum.runs.records import timings_jsonl


class Ending:
    """Decide after which step a run ends; `signal` is the number of the signal that asks it to stop, or None."""

    def __init__(self, train: TrainConfig) -> None:
        self.steps = train.steps
        self.spending = BudgetTracker()
        self.signal: int | None = None
        self._budget = train.budget
        self._finish: Alarm | None = None

    def recall_spending(self, home: RunDir) -> None:
        """Count what the steps before a resume spent, from the rows about them."""
        for path, shape in (
            (home.metrics_jsonl, shapes.METRICS),
            (timings_jsonl(home), shapes.TIMINGS),
        ):
            for row in read_rows(path, shape) if path.is_file() else ():
                self.spending.add(row)

    def finish_by(self, alarm: Alarm) -> bool:
        """Return whether the alarm ends the run well before its last step; the first that does is the reason."""
        finishes = alarm.action == "finish" and alarm.step < self.steps
        if finishes and self._finish is None:
            self._finish = alarm
        return finishes

    @property
    def reason(self) -> str | None:
        """Why the run ends before all of its steps are done, or None; a next step is taken to cost what the dearest of late did."""
        if self._finish is not None:
            return f"{FINISHED} {self._finish.id} {self._finish.name}"
        over = (
            None
            if self._budget is None
            else self._budget.exceeded(self.spending.spent, self.spending.next_step)
        )
        return None if over is None else f"{SPENT}: no further step fits its {over}"

    def comes_after(self, step: int) -> bool:
        """Return whether no step is to follow this one; a signal stops the run, which then goes on another time."""
        return step == self.steps or self.reason is not None
