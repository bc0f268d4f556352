"""Connect to a Ray cluster or start one, and place processes on its GPUs."""

import atexit
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
import torch
from ray.exceptions import RayError

from practicum.backends.ray.pulse import Pulse, Sign, ThreadedCall, knock, run_within
from practicum.core.leaving import LAST_ACTS
from practicum.errors import PracticumError, ResourceError, TooFewGpus
from practicum.models.config import ModelConfig

T = TypeVar("T")

log = logging.getLogger(__name__)

RETRIES = 3
"""Times that a process without state of its own is started again, and a request repeated."""


RELEASE_SECONDS = 10.0
"""The time in which Ray notices that the GPUs of ended processes are free."""

RELEASE_POLL_SECONDS = 0.2


RAYS_FOLDER = os.fsencode(Path(ray.__file__).parent) + b"/"
"""The folder of the programs that Ray starts."""

CONNECT_SECONDS = 10.0
"""The time in which the cluster of RAY_ADDRESS takes a connection."""

ANSWER_SECONDS = 10.0
"""The time in which Ray answers a question about its machines and GPUs."""

QUIET_SECONDS = 2.0
"""The time in which Ray ends by itself, before its processes are killed and the error is shown."""

SHUTDOWN_SECONDS = 20.0
"""The time in which Ray ends at all."""

FAREWELL_SECONDS = 120.0
"""The time in which Ray gives up a machine that is gone; its own health checks take half a minute."""

FAREWELL_POLL_SECONDS = 1.0


class SharedRay:
    """The connection of this process to Ray, which several runs may share.

    It ends with its last user, unless Ray was connected before the first one.
    """

    users = 0
    was_started = False


class RayCluster:
    """A connection to Ray; the processes that it started end with it."""

    def __init__(
        self,
        at_end: ExitStack,
        list_smaller: Callable[[int], list[str]] = lambda missing: [],
        silence: float = 20.0,
    ) -> None:
        """`list_smaller` lists the changes to a recipe with which it does without some GPUs.

        `silence` are the seconds without a sign of life after which a process counts as stuck.
        """
        self._list_smaller = list_smaller
        self.pulse = Pulse(silence)
        self._processes: list[Any] = []
        if not ray.is_initialized():
            connect()
            SharedRay.was_started = True
        SharedRay.users += 1
        at_end.push(lambda kind, error, trace: self.end(error))
        _await_farewells()
        self._gpus = int(_ask(ray.cluster_resources).get("GPU", 0))
        self._announced = 0
        self._reserved = 0
        self._held = 0

    def announce(self, *groups: tuple[int, ModelConfig]) -> None:
        """Find out whether there are GPUs for groups of processes, each of one model.

        Raises TooFewGpus if the cluster has fewer, or if others hold them.
        """
        gpus = sum(count for count, config in groups if self._should_use_gpus(config))
        self._require(self._reserved + gpus)

    def reserve(self, program: type, count: int, config: ModelConfig, **options: Any) -> "Starter":
        """Reserve a GPU for each of `count` processes of a model, if it is to be on GPUs.

        Raises TooFewGpus if the cluster has fewer.
        """
        gpus = 1 if self._should_use_gpus(config) else 0
        self._reserved += gpus * count
        if self._reserved > self._announced:
            self._require(self._reserved)
        kind = ray.remote(num_cpus=0, num_gpus=gpus, **options)(program)
        return Starter(kind, partial(self._add_process, gpus))

    def count_missing(self) -> int:
        """Return how many of the reserved GPUs the cluster no longer has."""
        if not self._reserved:
            return 0
        return max(self._reserved - int(_ask(ray.cluster_resources).get("GPU", 0)), 0)

    def _require(self, gpus: int) -> None:
        """Raise TooFewGpus unless so many GPUs are free or are those of this run's processes."""
        self._announced = gpus
        if gpus > self._gpus:
            raise TooFewGpus(
                f"the recipe asks for {gpus} GPUs and the cluster has {self._gpus}",
                "lower backend.trainers, samplers or teachers, or join more machines with ray start",
                self._list_smaller(gpus - self._gpus),
            )
        free = self._held + _count_free_gpus(gpus - self._held) if gpus else 0
        if gpus > free:
            raise TooFewGpus(
                f"{gpus} GPUs are needed and {free} of {self._gpus} are free",
                "another run may hold the others: wait for it, or ask for fewer",
                self._list_smaller(gpus - free),
            )

    def _add_process(self, gpus: int, process: Any) -> None:
        self._held += gpus
        self._processes.append(process)

    def _should_use_gpus(self, config: ModelConfig) -> bool:
        return config.device != "cpu" and self._gpus > 0

    def end(self, error: BaseException | None = None) -> None:
        """End all processes, and the connection if no other run of this process uses it.

        `error` is what ended the run. It is shown before a long wait, and no wait is endless.
        """
        signs = self.pulse.list_signs()
        self.pulse.stop()
        with suppress(TimeoutError):
            run_within(partial(end_processes, tuple(self._processes)), QUIET_SECONDS)
        _kill_here(signs)
        self._processes.clear()
        SharedRay.users -= 1
        if SharedRay.was_started and SharedRay.users == 0:
            SharedRay.was_started = False
            shut_down(error)


def _await_farewells() -> None:
    """Wait until Ray has given up the machines that do not answer, whose GPUs it counts until then.

    A run that goes on after a machine was lost comes here before Ray knows of the loss.
    """
    deadline = time.monotonic() + FAREWELL_SECONDS
    while silent := [address for address in _list_machines() if knock(address) != "answers"]:
        if time.monotonic() >= deadline:
            raise ResourceError(
                f"{', '.join(f'{host}:{port}' for host, port in silent)} belongs to the Ray cluster "
                f"and has not answered for {FAREWELL_SECONDS:g} s; end Ray there with ray stop, or "
                "open its ports to this machine"
            )
        time.sleep(FAREWELL_POLL_SECONDS)


def _list_machines() -> list[tuple[str, int]]:
    """Return the addresses at which Ray's own processes listen on all machines."""
    return [
        (node["NodeManagerAddress"], node["NodeManagerPort"])
        for node in _ask(ray.nodes)
        if node["Alive"]
    ]


def _ask(question: Callable[[], T]) -> T:
    """Return what Ray says of its machines. Raises ResourceError if it does not answer in time."""
    try:
        return run_within(question, ANSWER_SECONDS)
    except TimeoutError:
        raise ResourceError(
            f"Ray has not answered for {ANSWER_SECONDS:g} s which machines it has; look at its head "
            "(gcs_server), or end it with ray stop"
        ) from None


def _count_free_gpus(enough: int) -> int:
    """Return the GPUs that no process holds; those of processes that just ended come back late."""
    deadline = time.monotonic() + RELEASE_SECONDS
    while True:
        free = int(_ask(ray.available_resources).get("GPU", 0))
        if free >= enough or time.monotonic() >= deadline:
            return free
        time.sleep(RELEASE_POLL_SECONDS)


class Starter:
    """Starts processes of one kind."""

    def __init__(self, program: Any, add_process: Callable[[Any], None]) -> None:
        self._program = program
        self._add_process = add_process

    def start(self, *arguments: Any) -> Any:
        """Start one process; it loads nothing before its first request."""
        process = self._program.remote(*arguments)
        self._add_process(process)
        return process


def end_processes(processes: Sequence[Any]) -> None:
    """End processes at once, whatever they are waiting for."""
    for process in processes:
        ray.kill(process)


def shut_down(error: BaseException | None = None) -> None:
    """End Ray within `SHUTDOWN_SECONDS`; a thread of it that is stuck by then is left behind.

    If it takes more than a moment, show the error that ended the run first.
    """
    outcome = ThreadedCall(ray.shutdown)
    if outcome.done.wait(QUIET_SECONDS):
        return outcome.get()
    if isinstance(error, PracticumError) and error.exit_code:
        print(f"error: {error}", file=sys.stderr, flush=True)
        error.was_shown = True
    if outcome.done.wait(SHUTDOWN_SECONDS - QUIET_SECONDS):
        return outcome.get()
    log.warning(f"Ray did not end within {SHUTDOWN_SECONDS:g} s; it is left behind")
    # Ray calls it again at the end of the process, and would be stuck again.
    atexit.unregister(ray.shutdown)
    LAST_ACTS.append(kill_ray)
    return None


def kill_ray() -> None:
    """Kill the processes that Ray started on this machine for this process."""
    pids = list(_find_descendants(os.getpid()))
    # Ray ends this process with its own exit code once the raylet is gone: kill the raylet last.
    for pid in sorted(pids, key=lambda pid: b"raylet/raylet" in _read_words(pid)):
        _kill_if_rays(pid)


def _kill_here(signs: Sequence[Sign]) -> None:
    """Kill the processes on this machine by their numbers: Ray's own end may not reach them."""
    for sign in signs:
        if sign.host == socket.gethostname():
            _kill_if_rays(sign.pid)


def _kill_if_rays(pid: int) -> None:
    """Kill a process unless its number belongs to a program that is none of Ray's."""
    words = _read_words(pid)
    if words.startswith(b"ray::") or RAYS_FOLDER in words:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _read_words(pid: int) -> bytes:
    """Return the command line of a process, empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _find_descendants(pid: int) -> Iterator[int]:
    """Yield the processes that a process started, and theirs."""
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                yield from _find_descendants(child)
                yield child


def connect(object_store_memory: int | None = None, num_gpus: int | None = None) -> None:
    """Join the cluster that RAY_ADDRESS or this machine names, or start one of this machine alone.

    Both numbers are those of a cluster that is started; by default Ray finds them.

    Raises ResourceError if it cannot be reached.
    """
    handler = signal.getsignal(signal.SIGTERM)
    # Without a GPU of their own, processes keep the driver's environment; Ray warns of a change.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        _knock(os.environ.get("RAY_ADDRESS", ""))
        ray.init(
            include_dashboard=None if "RAY_ADDRESS" in os.environ else False,
            log_to_driver=False,
            object_store_memory=object_store_memory,
            num_gpus=num_gpus,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(torch.get_num_threads())}},
        )
    except (RayError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        remedy = "start it with ray start --head, or unset RAY_ADDRESS to use this machine alone"
        if "ersion mismatch" in reason:
            remedy = "install the same versions of Python and Ray on all machines"
        elif "Failed to connect" in reason and "RAY_AUTH_MODE" not in os.environ:
            # It answers a knock. Ray sends its token to no address that is named, unless it is told.
            remedy = (
                "if it asks for a token, set RAY_AUTH_MODE=token, with its ~/.ray/auth_token here"
            )
        raise ResourceError(f"the Ray cluster cannot be reached ({reason}); {remedy}") from error
    finally:
        # Ray ends the process on SIGTERM; a run saves its state first.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _knock(address: str) -> None:
    """Raise OSError if nothing answers at HOST:PORT; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if "/" not in host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
