"""Observers of a run's steps: each has one method, and they are called one after the other.

To add something, write a class with `on_step`. An error that an observer raises ends the run; the steps up to the newest checkpoint
are kept, as after a kill.
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
    """A step that was learned from: what it did, all readings among its metrics, and the alarms that they set off."""

    result: StepResult
    alarms: Sequence[Alarm] = ()

    @property
    def number(self) -> int:
        """The step's number, counted from 1."""
        return self.result.step

    @property
    def metrics(self) -> Metrics:
        """All that was measured, by name."""
        return self.result.metrics


class Observer(Protocol):
    """Act on every step that was learned from."""

    def on_step(self, step: FinishedStep) -> None:
        """Do it; a PracticumError ends the run with its exit code."""
        ...


@dataclass(frozen=True, slots=True)
class WriteRows:
    """Write the rows of metrics, seconds and rollouts."""

    records: RunJournals

    def on_step(self, step: FinishedStep) -> None:
        """Append them."""
        self.records.write(step.result)


@dataclass(frozen=True, slots=True)
class SendMetrics:
    """Send the metrics to the tracker that the recipe asks for."""

    tracked: RunTracker

    def on_step(self, step: FinishedStep) -> None:
        """Send them."""
        self.tracked.log(step.number, step.metrics)


@dataclass(frozen=True, slots=True)
class CountSpending:
    """Count what the step spent of the budget."""

    ending: Ending

    def on_step(self, step: FinishedStep) -> None:
        """Add it up."""
        self.ending.spending.add(step.metrics)


@dataclass(frozen=True, slots=True)
class MoveSchedules:
    """Let adaptive schedules see what was measured."""

    courses: ScheduleState

    def on_step(self, step: FinishedStep) -> None:
        """Move them; NumericError where their metric was not measured."""
        self.courses.after_step(step.metrics)


@dataclass(frozen=True, slots=True)
class ShowStep:
    """Show the step on the console, and what is slower than it was."""

    console: Console
    pace: PhaseSpeedMonitor

    def on_step(self, step: FinishedStep) -> None:
        """Show its line and a sample."""
        self.console.step(step.number, add_speed(step.metrics), format_sample(step.result.rollouts))
        for line in self.pace.judge(step.metrics):
            log.info(line)


@dataclass(frozen=True, slots=True)
class SoundAlarms:
    """Write the alarms, say them, and change what the recipe lets them change."""

    records: RunJournals
    courses: ScheduleState
    ending: Ending

    def on_step(self, step: FinishedStep) -> None:
        """Raise AlarmError where one of them stops the run before the step is kept."""
        self.records.write_alarms(step.alarms)
        for alarm in step.alarms:
            self.courses.change(alarm.set)
            if alarm.action != "log":
                log.info(f"alarm: {alarm.line()}")
            if self.ending.finish_by(alarm):
                log.info(
                    f"finished after step {alarm.step} of {self.ending.steps}, as {alarm.id} asks"
                )
        worst = find_worst_alarm(step.alarms)
        if worst is not None and worst.action == "stop":
            raise AlarmError(
                f"stopped by {worst.line()}; this step's weights are not kept, the newest checkpoint is from before: go on from it "
                f"with --resume monitors.{worst.id}=warn, or start again with the change"
            )


@dataclass(frozen=True, slots=True)
class HearSignals:
    """Ask whether a signal wants the run to stop."""

    stop: Stop
    ending: Ending

    def on_step(self, step: FinishedStep) -> None:
        """Remember its number, for the state is saved before the run stops."""
        self.ending.signal = self.stop()


class SaveCheckpoints:
    """Save the state where it is time to, where an alarm asks for it, and where the run ends; `saved` is the newest step saved.

    `save(step, tag)` writes a checkpoint; every row before it is on the disk then.
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
        self._final_stop_token = ending

    def on_step(self, step: FinishedStep) -> None:
        """Save the state after the step, where there is a reason to."""
        tag = tag_of(step.alarms)
        regular = self._every is not None and step.number % self._every == 0
        ends = (
            self._final_stop_token.comes_after(step.number)
            or self._final_stop_token.signal is not None
        )
        if ends or regular or tag is not None:
            self.save(step.number, tag)

    def save(self, step: int, tag: str | None = None) -> None:
        """Save the state after a step, rows first."""
        self._records.sync()
        self._save(step, tag)
        self.saved = step


@dataclass(frozen=True, slots=True)
class LeaveRun:
    """End the run, its state saved, where a monitor wants to be looked at first or a signal asked for it."""

    ending: Ending

    def on_step(self, step: FinishedStep) -> None:
        """Raise AlarmError or Interrupted."""
        worst = find_worst_alarm(step.alarms)
        if worst is not None and worst.action == "pause" and worst.step < self.ending.steps:
            raise AlarmError(
                f"paused by {worst.line()}; the state is saved: look, then go on with --resume, or start again with the change"
            )
        number = self.ending.signal
        if number is not None and not self.ending.comes_after(step.number):
            raise Interrupted(
                number,
                f"stopped by {signal.Signals(number).name} after step {step.number} of {self.ending.steps}; the state is saved, "
                "go on with --resume",
            )


def tag_of(alarms: Sequence[Alarm]) -> str | None:
    """Return why the checkpoint of a step is to be kept, where an alarm says so."""
    lines = [alarm.line() for alarm in alarms if alarm.action in ("checkpoint", "finish", "pause")]
    return "\n".join(lines) if lines else None
