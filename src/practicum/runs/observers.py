"""Observers of a run's steps: functions of the finished step that the run calls in order.

To add one, write a function, or give a method of an object that keeps something from step to step.
An error in an observer ends the run; the steps up to the newest checkpoint are kept, as after a
kill.
"""

import logging
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from time import monotonic

from practicum.core.options import spell_options
from practicum.core.stopping import Stop
from practicum.errors import AlarmError, Interrupted, PracticumError
from practicum.monitors import Alarm, PhaseSpeedMonitor, find_worst_alarm
from practicum.recipe.schedule import ScheduleState
from practicum.report.tables import add_speed, format_sample
from practicum.run_dir import BestTracker
from practicum.runs.console import Console
from practicum.runs.ending import Ending
from practicum.runs.records import RunJournals
from practicum.types import Metrics, StepResult

log = logging.getLogger(__name__)

SECONDS_BETWEEN_CHECKPOINTS = 600.0
"""The time between checkpoints of a recipe without `train.checkpoint_every`."""


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


Observer = Callable[[FinishedStep], None]
"""An action after every step. A PracticumError ends the run with its exit code."""


def show_step(console: Console, pace: PhaseSpeedMonitor, step: FinishedStep) -> None:
    """Show the step's line and a sample on the console, and warn of phases that became slower."""
    console.step(step.number, add_speed(step.metrics), format_sample(step.result.rollouts))
    for line in pace.judge(step.metrics):
        log.info(line)


def sound_alarms(
    records: RunJournals, schedule_state: ScheduleState, ending: Ending, step: FinishedStep
) -> None:
    """Write and log the alarms, and apply the recipe changes that they may make.

    Raises AlarmError if one stops the run before the step is saved.
    """
    records.write_alarms(step.alarms)
    for alarm in step.alarms:
        schedule_state.change(alarm.set)
        if alarm.action != "log":
            log.info(f"alarm: {alarm.describe()}")
        if ending.finish_by(alarm):
            log.info(f"finished after step {alarm.step} of {ending.steps}, as {alarm.id} asks")
    worst = find_worst_alarm(step.alarms)
    if worst is not None and worst.action == "stop":
        go_on = spell_options(resume=True, overrides=[f"monitors.{worst.id}=warn"])
        raise AlarmError(
            f"stopped by {worst.describe()}; this step's weights are not saved; the newest "
            f"checkpoint is from an earlier step: resume from it with {go_on}, or start again with the "
            "change"
        )


def check_signals(stop: Stop, ending: Ending, step: FinishedStep) -> None:
    """Record the number of a signal that asks for a stop; the state is saved before the run stops."""
    ending.signal = stop()


@dataclass(frozen=True, slots=True)
class CheckpointInterval:
    """The distance between regular checkpoints in steps, or in seconds since the newest one."""

    steps: int | None = None
    seconds: float | None = None

    def is_over(self, step: int, saved_at: float) -> bool:
        """Return True if a checkpoint is due after a step; the newest is from `saved_at`."""
        if self.steps is not None and step % self.steps == 0:
            return True
        return self.seconds is not None and monotonic() - saved_at >= self.seconds


class SaveCheckpoints:
    """Save checkpoints at regular and at best steps, when an alarm asks, and when the run ends.

    `save(step, tag)` writes a checkpoint; `saved` is the newest saved step. With `copy(step)`,
    which copies the state and returns a function that writes it, regular checkpoints are written in
    another
    thread, one at a time. The step that becomes the `best` one is saved like a regular one.
    """

    def __init__(
        self,
        records: RunJournals,
        save: Callable[[int, str | None], None],
        interval: CheckpointInterval,
        ending: Ending,
        saved: int,
        copy: Callable[[int], Callable[[], None]] | None = None,
        best: BestTracker | None = None,
    ) -> None:
        self.saved = saved
        self._saved_at = monotonic()
        self._best = best or BestTracker(None)
        self._records = records
        self._save = save
        self._interval = interval
        self._ending = ending
        self._copy = copy
        self._writer = ThreadPoolExecutor(1, "checkpoints")
        self._pending: tuple[int, Future[None]] | None = None

    def on_step(self, step: FinishedStep) -> None:
        """Save the state after the step if there is a reason to.

        Raises the error of a checkpoint that could not be written since the last step.
        """
        if self._pending is not None and self._pending[1].done():
            self._settle()
        tag = build_tag(step.alarms)
        is_best = self._best.update(step.number, step.metrics)
        is_regular = is_best or self._interval.is_over(step.number, self._saved_at)
        is_last = self._ending.is_last(step.number) or self._ending.signal is not None
        # A checkpoint that ends the run or is kept for ever is written before the run continues.
        if is_last or tag is not None or (is_regular and self._copy is None):
            self.save(step.number, tag)
        elif is_regular and self._copy is not None:
            self._settle()
            self._records.sync()
            self._saved_at = monotonic()
            # The thread runs in a copy of this context, so that it logs to the console of this run.
            write = partial(copy_context().run, self._copy(step.number))
            self._pending = step.number, self._writer.submit(write)

    def save(self, step: int, tag: str | None = None) -> None:
        """Flush the rows to the disk, then save the state after a step."""
        self._settle()
        self._records.sync()
        self._save(step, tag)
        self.saved, self._saved_at = step, monotonic()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written; log its error, because another error is raised."""
        try:
            self._settle()
        except PracticumError as error:
            log.warning(str(error))

    def close(self) -> None:
        """End the thread after its checkpoint."""
        self.finish()
        self._writer.shutdown()

    def _settle(self) -> None:
        """Wait for the checkpoint that is being written, and raise its error."""
        if self._pending is not None:
            (step, future), self._pending = self._pending, None
            future.result()
            self.saved = step


def leave_run(ending: Ending, step: FinishedStep) -> None:
    """End the run after its state is saved: raise AlarmError if a monitor pauses it, or Interrupted.

    A signal after the last step changes nothing.
    """
    worst = find_worst_alarm(step.alarms)
    if worst is not None and worst.action == "pause" and worst.step < ending.steps:
        raise AlarmError(
            f"paused by {worst.describe()}; the state is saved: check the run, then resume with "
            f"{spell_options(resume=True)}, or start again with the change"
        )
    if ending.signal is not None and not ending.is_last(step.number):
        name = signal.Signals(ending.signal).name
        reason = f"stopped by {name} after step {step.number} of {ending.steps}"
        go_on = f"resume with {spell_options(resume=True)}"
        raise Interrupted(ending.signal, f"{reason}; the state is saved, {go_on}")


def build_tag(alarms: Sequence[Alarm]) -> str | None:
    """Return the text that protects a step's checkpoint from pruning, or None."""
    actions = ("checkpoint", "finish", "pause")
    return "\n".join(alarm.describe() for alarm in alarms if alarm.action in actions) or None
