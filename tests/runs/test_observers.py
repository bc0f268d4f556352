"""Observers one by one: the effect of each on a step, and the end of a run."""

import signal
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from threading import Event, Timer
from typing import Any

import pytest
import torch

from practicum.errors import AlarmError, Interrupted, PracticumError, ResourceError
from practicum.monitors import Alarm
from practicum.recipe import TrainConfig
from practicum.recipe.schedule import ScheduleState
from practicum.runs import observers
from practicum.runs.ending import Ending
from practicum.runs.observers import (
    CheckpointInterval,
    FinishedStep,
    Observer,
    SaveCheckpoints,
    build_tag,
    check_signals,
    leave_run,
    sound_alarms,
)
from practicum.types import StepResult, TokenRecord


class Spy:
    """Replaces records and the checkpoint writer, and records the order of calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def sync(self) -> None:
        self.calls.append("sync")

    def save(self, step: int, tag: str | None) -> None:
        self.calls.append((step, tag))

    def write_alarms(self, alarms: Any) -> None:
        self.calls.append([alarm.id for alarm in alarms])


def alarm(action: str, step: int = 2) -> Alarm:
    return Alarm(step, "M1", "collapse", "entropy", 0.1, None, 8, "below 1", action, [])


def finished(step: int, *alarms: Alarm, **metrics: float) -> FinishedStep:
    return FinishedStep(StepResult(step, [], TokenRecord(*[torch.empty(0)] * 7), metrics), alarms)


def ending(steps: int = 4, **train: Any) -> Ending:
    return Ending(TrainConfig(steps=steps, **train))


def saving(spy: Spy, end: Ending, every: int | None = None) -> SaveCheckpoints:
    return SaveCheckpoints(spy, spy.save, CheckpointInterval(every), end, saved=0)  # type: ignore[arg-type]


class BehindSpy(Spy):
    """Copies immediately, and writes when the test allows it."""

    def __init__(self, error: PracticumError | None = None) -> None:
        super().__init__()
        self.may_write = Event()
        self.error = error

    def copy(self, step: int) -> Callable[[], None]:
        self.calls.append(f"copy {step}")

        def write() -> None:
            assert self.may_write.wait(10)
            if self.error is not None:
                raise self.error
            self.calls.append(f"written {step}")

        return write


def saving_behind(spy: BehindSpy, steps: int) -> SaveCheckpoints:
    return SaveCheckpoints(
        spy, spy.save, CheckpointInterval(1), ending(steps), saved=0, copy=spy.copy
    )  # type: ignore[arg-type]


def observe(observers: Sequence[Observer], step: FinishedStep) -> None:
    for observer in observers:
        observer(step)


def test_a_checkpoint_is_saved_where_it_is_time_to_and_at_the_end_after_the_rows() -> None:
    spy = Spy()
    saver = saving(spy, ending(5), every=2)
    for step in range(1, 6):
        saver.on_step(finished(step))
    assert spy.calls == ["sync", (2, None), "sync", (4, None), "sync", (5, None)]
    assert saver.saved == 5


def test_without_a_number_of_steps_the_clock_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count from the start, then from the newest checkpoint of any kind."""
    clock = iter([0, 599, 600, 600, 900, 900, 1499, 1500, 1500, 9999])
    monkeypatch.setattr(observers, "monotonic", lambda: next(clock))
    spy = Spy()
    saver = SaveCheckpoints(spy, spy.save, CheckpointInterval(None, 600), ending(9), saved=0)  # type: ignore[arg-type]
    saver.on_step(finished(1))
    assert spy.calls == []
    saver.on_step(finished(2))
    assert spy.calls == ["sync", (2, None)]
    tagged = alarm("checkpoint")
    saver.on_step(finished(3, tagged))
    saver.on_step(finished(4))
    assert spy.calls[2:] == ["sync", (3, tagged.describe())]
    saver.on_step(finished(5))
    assert spy.calls[4:] == ["sync", (5, None)]


def test_in_the_background_a_step_is_saved_once_it_is_written_and_the_next_one_waits() -> None:
    spy = BehindSpy()
    with closing(saving_behind(spy, 4)) as saver:
        saver.on_step(finished(1))
        assert spy.calls == ["sync", "copy 1"] and saver.saved == 0
        Timer(0.1, spy.may_write.set).start()
        saver.on_step(finished(2))
        assert spy.calls[2:5] == ["written 1", "sync", "copy 2"] and saver.saved == 1
        saver.on_step(finished(3, alarm("checkpoint")))
        assert spy.calls[5:] == ["written 2", "sync", (3, alarm("checkpoint").describe())]
        saver.on_step(finished(4))
        assert spy.calls[8:] == ["sync", (4, None)] and saver.saved == 4


def test_an_error_in_the_background_ends_the_run_at_the_next_step_unless_another_one_does(
    notes: list[str],
) -> None:
    for is_followed in (True, False):
        spy = BehindSpy(ResourceError("checkpoint of step 1 needs room"))
        with closing(saving_behind(spy, 9)) as saver:
            saver.on_step(finished(1))
            spy.may_write.set()
            if is_followed:
                with pytest.raises(ResourceError, match=r"^checkpoint of step 1 needs room$"):
                    saver.on_step(finished(2))
        assert saver.saved == 0
        assert notes == ([] if is_followed else ["warning: checkpoint of step 1 needs room"])


@pytest.mark.parametrize("action", ["checkpoint", "finish", "pause"])
def test_a_checkpoint_that_an_alarm_asks_for_says_why_it_is_kept(action: str) -> None:
    spy = Spy()
    saving(spy, ending()).on_step(finished(2, alarm("warn"), alarm(action)))
    assert spy.calls == ["sync", (2, alarm(action).describe())]
    assert build_tag([alarm("warn"), alarm("log"), alarm("stop")]) is None


def test_a_signal_is_heard_once_saved_and_then_obeyed() -> None:
    spy, end = Spy(), ending()
    asked = iter([None, signal.SIGTERM])
    observers = [
        partial(check_signals, lambda: next(asked), end),
        saving(spy, end).on_step,
        partial(leave_run, end),
    ]
    observe(observers, finished(1))
    assert spy.calls == []
    with pytest.raises(
        Interrupted, match="stopped by SIGTERM after step 2 of 4; the state is saved"
    ):
        observe(observers, finished(2))
    assert spy.calls == ["sync", (2, None)]


def test_a_signal_in_the_last_step_changes_nothing() -> None:
    end = ending()
    end.signal = signal.SIGINT
    leave_run(end, finished(4))


def test_a_pause_ends_the_run_unless_it_is_over() -> None:
    with pytest.raises(AlarmError, match="paused by M1 collapse"):
        leave_run(ending(), finished(2, alarm("pause")))
    leave_run(ending(2), finished(2, alarm("pause")))


def test_a_stop_comes_before_the_checkpoint_and_after_its_row(notes: list[str]) -> None:
    spy, end = Spy(), ending()
    sound = partial(sound_alarms, spy, ScheduleState({}, 4), end)  # type: ignore[arg-type]
    with pytest.raises(
        AlarmError, match=r"stopped by M1 collapse .*with resume=True, overrides=..monitors.M1=warn"
    ):
        sound(finished(2, alarm("log"), alarm("stop")))
    assert spy.calls == [["M1", "M1"]]
    assert notes == [f"alarm: {alarm('stop').describe()}"]


def test_a_finish_ends_the_run_well_and_the_first_is_the_reason(notes: list[str]) -> None:
    end = ending()
    sound = partial(sound_alarms, Spy(), ScheduleState({}, 4), end)  # type: ignore[arg-type]
    assert not end.is_last(2) and end.is_last(4)
    sound(finished(2, alarm("finish")))
    assert end.is_last(2) and end.reason == "finished by M1 collapse"
    assert notes[-1] == "finished after step 2 of 4, as M1 asks"
    assert not ending().finish_by(alarm("finish", step=4))


def test_a_budget_ends_the_run_before_the_step_that_it_does_not_pay() -> None:
    end = ending(budget={"tokens": 250})
    end.spending.add({"tokens": 100.0})
    assert end.reason is None
    end.spending.add({"tokens": 100.0})
    assert (
        end.reason is not None
        and end.reason.startswith("budget spent: no further step fits its")
        and end.is_last(2)
    )
