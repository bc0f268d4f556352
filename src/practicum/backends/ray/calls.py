"""Ask processes of a cluster, with a deadline, and say in one line who did not answer."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from practicum.backends._sharded.silence import build_silence_error
from practicum.backends.ray.pulse import Pulse, ThreadedCall
from practicum.core import abandon
from practicum.core.options import spell_options
from practicum.errors import PracticumError, WorkerLost

T = TypeVar("T")

POLL_SECONDS = 0.5
"""The time between two looks whether the caller's work was cancelled."""

AFTERMATH_SECONDS = 3.0
"""The time in which other processes may still say what the first failure followed from."""

REPLACEMENT_SECONDS = 120.0
"""The time in which another machine may come in the place of a lost one."""

PROGRESS_SECONDS = 2.0
"""The time in which a process says at which pass it is."""


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """The seconds in which a request is answered, and the restarts of a run that loses a process."""

    seconds: float
    restarts: int
    count_missing: Callable[[], int] = lambda: 0
    """Count the GPUs of the run that went with a machine, so that no process can start there."""
    starting: float = 3600.0
    """The seconds in which a process starts and loads its models."""
    pulse: Pulse | None = None
    """The signs of life of the run's processes."""
    key: str = "backend.patience"
    """The recipe's key of `seconds`."""

    def for_start(self) -> "AnswerLimits":
        """Return the limits of a request to a process that starts, or loads a model."""
        return replace(self, seconds=self.starting, key="backend.start_patience")

    def check_pulse(self, verb: str) -> None:
        """Raise WorkerLost if a process or a machine of the run is stuck, and name it."""
        if self.pulse is not None and (stuck := self.pulse.find_stuck()):
            raise build_silence_error(stuck, self.pulse.limit, verb, self.restarts)


def wait_for(
    references: Mapping[str, Any],
    verb: str,
    patience: AnswerLimits,
    describe_progress: Callable[[str], str] | None = None,
) -> None:
    """Wait until all processes, by their titles, have answered a request.

    Raises the PracticumError or OSError of one that met it, and WorkerLost if one died or did not
    answer in time.
    """
    titles = {reference: title for title, reference in references.items()}
    waiting = list(titles)
    complete = time.monotonic()
    deadline = complete + patience.seconds
    while waiting:
        abandon.check()
        patience.check_pulse(verb)
        remaining = deadline - time.monotonic()
        ready, waiting = ray.wait(
            waiting,
            num_returns=1,
            timeout=max(min(remaining, POLL_SECONDS), 0.0),
            fetch_local=False,
        )
        for reference in ready:
            if (error := _find_error(reference, verb, patience)) is not None:
                _raise_cause({titles[reference]: error}, titles, waiting, verb, patience)
        if not waiting or ready:
            continue
        missing = patience.count_missing()
        complete = complete if missing else time.monotonic()
        if time.monotonic() - complete > REPLACEMENT_SECONDS:
            raise WorkerLost(
                f"{missing} of the GPUs of this run left the cluster, and {verb} waits for a process "
                f"there; go on from the newest checkpoint with {spell_options(resume=True)}",
                patience.restarts,
            )
        if remaining <= 0:
            _raise_late(
                [titles[reference] for reference in waiting], verb, patience, describe_progress
            )


def call_within(call: Callable[[], T], verb: str, patience: AnswerLimits) -> T:
    """Return the result of a call to Ray that takes no timeout, such as `ray.put`.

    Raises WorkerLost if a process or a machine of the run is stuck, or if the call takes too long.
    """
    outcome = ThreadedCall(call)
    deadline = time.monotonic() + patience.seconds
    while not outcome.done.wait(POLL_SECONDS):
        abandon.check()
        patience.check_pulse(verb)
        if time.monotonic() >= deadline:
            _raise_late(["Ray on this machine"], verb, patience, None)
    return outcome.get()


def _find_error(reference: Any, verb: str, patience: AnswerLimits) -> Exception | None:
    """Return the error of an answer, or None."""

    def read() -> Exception | None:
        try:
            ray.get(reference)
        except (RayError, OSError, PracticumError) as error:
            return error
        return None

    return call_within(read, verb, patience)


def _raise_cause(
    errors: dict[str, Exception],
    titles: Mapping[Any, str],
    waiting: Sequence[Any],
    verb: str,
    patience: AnswerLimits,
) -> NoReturn:
    """Raise what explains the failure best: an error in words, a death, then anything else."""
    # When one rank dies, the collectives of the others fail, and their errors may come first.
    if waiting and not isinstance(next(iter(errors.values())), RayActorError):
        ready, _ = ray.wait(
            list(waiting), num_returns=len(waiting), timeout=AFTERMATH_SECONDS, fetch_local=False
        )
        late = {titles[reference]: _find_error(reference, verb, patience) for reference in ready}
        errors |= {title: error for title, error in late.items() if error is not None}
    for error in errors.values():
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, PracticumError | OSError) and not isinstance(cause, RayError):
            raise cause from None
    for title, error in errors.items():
        if isinstance(error, RayActorError):
            # Without a line of its own the process was killed; with one it could not start.
            reason = "" if "creation task" not in str(error) else f" ({_find_last_line(error)})"
            raise _build_loss(title, verb, patience, reason) from error
    title, error = next(iter(errors.items()))
    cause = error.cause if isinstance(error, RayTaskError) else error
    raise _build_loss(
        title, verb, patience, f" ({type(cause).__name__}: {_shorten(cause)})"
    ) from error


def _build_loss(title: str, verb: str, patience: AnswerLimits, reason: str = "") -> WorkerLost:
    """Return the error of a process that was lost."""
    return WorkerLost(
        f"{title} was lost in {verb}{reason}; nothing of this step is kept, go on from the newest "
        f"checkpoint with {spell_options(resume=True)}",
        patience.restarts,
    )


def _raise_late(
    titles: Sequence[str],
    verb: str,
    patience: AnswerLimits,
    describe_progress: Callable[[str], str] | None,
) -> NoReturn:
    """Raise WorkerLost with the processes that did not answer, and what they are at."""
    places = [
        f"{title} {describe_progress(title)}" if describe_progress else title for title in titles
    ]
    raise WorkerLost(
        f"no answer to {verb} in {patience.seconds:g} s ({patience.key}) from {', '.join(places)}; "
        f"look at its machine, then go on with {spell_options(resume=True)}",
        patience.restarts,
    )


def ask_progress(process: Any) -> str:
    """Describe the current work of a process, or say that it gives no sign of life."""
    try:
        sign: Any = ray.get(process.give_sign.remote(), timeout=PROGRESS_SECONDS)
    except (RayError, GetTimeoutError):
        return "(stuck: no sign of life)"
    return f"at {sign.work or 'nothing yet'}"


def _find_last_line(error: Exception) -> str:
    """Return the last line of a traceback from another process, which says the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200]


def _shorten(error: BaseException | None) -> str:
    return " ".join(str(error).split())[:200]
