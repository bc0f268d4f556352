"""Observers of a run's steps: each has one method, and the run calls them in order.

To add one, write a class with `on_step`. An error in an observer ends the run; the steps up to the
newest checkpoint are kept, as after a kill.
"""

import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from practicum.core.stopping import Stop
from practicum.errors import AlarmError, Interrupted
from practicum.monitors import Alarm, PhaseSpeedMonitor, find_worst_alarm
from practicum.recipe.schedule import ScheduleState
from practicum.report.tables import add_speed, format_sample
from practicum.runs.console import Console
from practicum.runs.ending import Ending
from practicum.runs.records import RunJournals
from practicum.runs.tracked import RunTracker
from practicum.training.loop import StepResult
from practicum.types import Metrics

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A finished step: its result, with all readings among the metrics, and its alarms."""

    result: StepResult
    alarms: Sequence[Alarm] = ()

    @property
    def number(self) -> int:
        """Return the step's number, counted from 1."""
        return self.result.step

    @property
    def metrics(self) -> Metrics:
        """Return the step's metrics by name."""
        return self.result.metrics


class Observer(Protocol):
    """An action after every step."""

    def on_step(self, step: FinishedStep) -> None:
        """Act on the step. A PracticumError ends the run with its exit code."""
        ...


@dataclass(frozen=True, slots=True)
class WriteRows:
    """Write the rows of metrics, seconds and rollouts."""

    records: RunJournals

    def on_step(self, step: FinishedStep) -> None:
        """Append the rows of the step."""
        self.records.write(step.result)


@dataclass(frozen=True, slots=True)
class SendMetrics:
    """Send the metrics to the tracker that the recipe asks for."""

    tracker: RunTracker

    def on_step(self, step: FinishedStep) -> None:
        """Send the step's metrics."""
        self.tracker.log(step.number, step.metrics)


@dataclass(frozen=True, slots=True)
class CountSpending:
    """Count what the step spent of the budget."""

    ending: Ending

    def on_step(self, step: FinishedStep) -> None:
        """Add the step's costs."""
        self.ending.spending.add(step.metrics)


@dataclass(frozen=True, slots=True)
class MoveSchedules:
    """Update adaptive schedules with the metrics of the step."""

    schedule_state: ScheduleState

    def on_step(self, step: FinishedStep) -> None:
        """Update the schedules; raises NumericError if their metric is missing."""
        self.schedule_state.update(step.metrics)


@dataclass(frozen=True, slots=True)
class ShowStep:
    """Show the step on the console, and warn of phases that became slower."""

    console: Console
    pace: PhaseSpeedMonitor

    def on_step(self, step: FinishedStep) -> None:
        """Show the step's line, a sample and the warnings."""
        self.console.step(step.number, add_speed(step.metrics), format_sample(step.result.rollouts))
        for line in self.pace.judge(step.metrics):
            log.info(line)


@dataclass(frozen=True, slots=True)
class SoundAlarms:
    """Write and log the alarms, and apply the recipe changes that they may make."""

    records: RunJournals
    schedule_state: ScheduleState
    ending: Ending

    def on_step(self, step: FinishedStep) -> None:
        """Handle the alarms; raises AlarmError if one stops the run before the step is saved."""
        self.records.write_alarms(step.alarms)
        for alarm in step.alarms:
            self.schedule_state.change(alarm.set)
            if alarm.action != "log":
                log.info(f"alarm: {alarm.describe()}")
            if self.ending.finish_by(alarm):
                log.info(
                    f"finished after step {alarm.step} of {self.ending.steps}, as {alarm.id} asks"
                )
        worst = find_worst_alarm(step.alarms)
        if worst is not None and worst.action == "stop":
            raise AlarmError(
                f"stopped by {worst.describe()}; this step's weights are not kept, the newest "
                "checkpoint is from before: go on from it with --resume "
                f"monitors.{worst.id}=warn, or start again with the change"
            )


@dataclass(frozen=True, slots=True)
class HearSignals:
    """Check if a signal asks the run to stop."""

    stop: Stop
    ending: Ending

    def on_step(self, step: FinishedStep) -> None:
        """Record the signal's number; the state is saved before the run stops."""
        self.ending.signal = self.stop()


class SaveCheckpoints:
    """Save checkpoints at regular steps, when an alarm asks for one, and when the run ends.

    `save(step, tag)` writes a checkpoint; `saved` is the newest saved step.
    """

    def __init__(
        self,
        records: RunJournals,
        save: Callable[[int, str | None], None],
        every: int | None,
        ending: Ending,
        saved: int,
    ) -> None:
        self.saved = saved
        self._records = records
        self._save = save
        self._every = every
        self._ending = ending

    def on_step(self, step: FinishedStep) -> None:
        """Save the state after the step if there is a reason to."""
        tag = build_tag(step.alarms)
        is_regular = self._every is not None and step.number % self._every == 0
        is_last = self._ending.is_last(step.number) or self._ending.signal is not None
        if is_last or is_regular or tag is not None:
            self.save(step.number, tag)

    def save(self, step: int, tag: str | None = None) -> None:
        """Flush the rows to the disk, then save the state after a step."""
        self._records.sync()
        self._save(step, tag)
        self.saved = step


@dataclass(frozen=True, slots=True)
class LeaveRun:
    """End the run after its state is saved, if a monitor pauses it or a signal asks it to stop."""

    ending: Ending

    def on_step(self, step: FinishedStep) -> None:
        """Raise AlarmError or Interrupted."""
        worst = find_worst_alarm(step.alarms)
        if worst is not None and worst.action == "pause" and worst.step < self.ending.steps:
            raise AlarmError(
                f"paused by {worst.describe()}; the state is saved: look, then go on with --resume, "
                "or start again with the change"
            )
        number = self.ending.signal
        if number is not None and not self.ending.is_last(step.number):
            raise Interrupted(
                number,
                f"stopped by {signal.Signals(number).name} after step {step.number} of "
                f"{self.ending.steps}; the state is saved, go on with --resume",
            )


def build_tag(alarms: Sequence[Alarm]) -> str | None:
    """Return the text that protects a step's checkpoint from pruning, or None."""
    lines = [
        alarm.describe() for alarm in alarms if alarm.action in ("checkpoint", "finish", "pause")
    ]
    return "\n".join(lines) if lines else None
