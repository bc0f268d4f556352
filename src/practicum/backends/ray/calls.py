"""Call processes of a cluster with a deadline, and report processes that did not answer."""

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
"""The time between two checks whether the caller's work was cancelled."""

AFTERMATH_SECONDS = 3.0
"""The time that other processes have to report the cause of the first failure."""

REPLACEMENT_SECONDS = 120.0
"""The time in which another machine may replace a lost machine."""

PROGRESS_SECONDS = 2.0
"""The time in which a process reports its current pass."""


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """The timeout of a request in seconds, and the restarts of a run that loses a process."""

    seconds: float
    restarts: int
    count_missing: Callable[[], int] = lambda: 0
    """Count the run's GPUs that were lost with a machine: no process can start there."""
    starting: float = 3600.0
    """The timeout for starting a process and loading its models, in seconds."""
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
    """Wait until all processes have answered a request; the keys are the titles of the processes.

    Raises the PracticumError or OSError of a process that failed, and WorkerLost if a process died
    or did not answer in time.
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
                f"there; resume from the newest checkpoint with {spell_options(resume=True)}",
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
    """Raise the best explanation of the failure: a reported error, then a death, then any other."""
    # When one rank dies, collectives of the remaining ranks fail, and their errors may arrive
    # first.
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
            # Without an error message the process was killed; with a message it could not start.
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
        f"{title} was lost in {verb}{reason}; this step is discarded; resume from the newest "
        f"checkpoint with {spell_options(resume=True)}",
        patience.restarts,
    )


def _raise_late(
    titles: Sequence[str],
    verb: str,
    patience: AnswerLimits,
    describe_progress: Callable[[str], str] | None,
) -> NoReturn:
    """Raise WorkerLost with the processes that did not answer and their current work."""
    places = [
        f"{title} {describe_progress(title)}" if describe_progress else title for title in titles
    ]
    raise WorkerLost(
        f"no answer to {verb} in {patience.seconds:g} s ({patience.key}) from {', '.join(places)}; "
        f"check its machine, then resume with {spell_options(resume=True)}",
        patience.restarts,
    )


def ask_progress(process: Any) -> str:
    """Describe the current work of a process, or report that it gives no sign of life."""
    try:
        sign: Any = ray.get(process.give_sign.remote(), timeout=PROGRESS_SECONDS)
    except (RayError, GetTimeoutError):
        return "(stuck: no sign of life)"
    return f"at {sign.work or 'nothing yet'}"


def _find_last_line(error: Exception) -> str:
    """Return the last line of a traceback from another process, which names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200]


def _shorten(error: BaseException | None) -> str:
    return " ".join(str(error).split())[:200]
