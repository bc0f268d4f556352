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
"""The number of times that a stateless process is restarted and a request is repeated."""


RELEASE_SECONDS = 10.0
"""The time that Ray has to notice that the GPUs of ended processes are free."""

RELEASE_POLL_SECONDS = 0.2


RAYS_FOLDER = os.fsencode(Path(ray.__file__).parent) + b"/"
"""The folder of Ray's own programs."""

CONNECT_SECONDS = 10.0
"""The time in which the cluster at RAY_ADDRESS must accept a connection."""

ANSWER_SECONDS = 10.0
"""The time in which Ray must answer a question about its machines and GPUs."""

QUIET_SECONDS = 2.0
"""The time that Ray has to end by itself; then its processes are killed and the error is shown."""

SHUTDOWN_SECONDS = 20.0
"""The maximum time for ending Ray."""

FAREWELL_SECONDS = 120.0
"""The time in which Ray gives up a lost machine; its own health checks take half a minute."""

FAREWELL_POLL_SECONDS = 1.0


class SharedRay:
    """The connection of this process to Ray, which several runs may share.

    It ends with its last user, unless Ray was already connected before the first user.
    """

    users = 0
    was_started = False


class RayCluster:
    """A connection to Ray; processes that it started end with the connection."""

    def __init__(
        self,
        at_end: ExitStack,
        list_smaller: Callable[[int], list[str]] = lambda missing: [],
        silence: float = 20.0,
    ) -> None:
        """Open the connection; `list_smaller` lists recipe changes for missing GPUs.

        A process counts as stuck after `silence` seconds without a sign of life.
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
        """Check that there are enough GPUs for groups of processes, each group with one model.

        Raises TooFewGpus if the cluster has fewer GPUs, or if other runs hold them.
        """
        gpus = sum(count for count, config in groups if self._should_use_gpus(config))
        self._require(self._reserved + gpus)

    def reserve(self, program: type, count: int, config: ModelConfig, **options: Any) -> "Starter":
        """Reserve a GPU for each of `count` processes of a model, if the model uses GPUs.

        Raises TooFewGpus if the cluster has fewer GPUs.
        """
        gpus = 1 if self._should_use_gpus(config) else 0
        self._reserved += gpus * count
        if self._reserved > self._announced:
            self._require(self._reserved)
        kind = ray.remote(num_cpus=0, num_gpus=gpus, **options)(program)
        return Starter(kind, partial(self._add_process, gpus))

    def count_missing(self) -> int:
        """Return the number of reserved GPUs that the cluster no longer has."""
        if not self._reserved:
            return 0
        return max(self._reserved - int(_ask(ray.cluster_resources).get("GPU", 0)), 0)

    def _require(self, gpus: int) -> None:
        """Raise TooFewGpus unless `gpus` GPUs are free or held by this run's processes."""
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
                "another run may hold the rest: wait for it, or ask for fewer",
                self._list_smaller(gpus - free),
            )

    def _add_process(self, gpus: int, process: Any) -> None:
        self._held += gpus
        self._processes.append(process)

    def _should_use_gpus(self, config: ModelConfig) -> bool:
        return config.device != "cpu" and self._gpus > 0

    def end(self, error: BaseException | None = None) -> None:
        """End all processes, and the connection if no other run of this process uses it.

        `error` is the error that ended the run. It is shown before a long wait, and every wait has
        a limit.
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
    """Wait until Ray has given up silent machines; until then it counts their GPUs.

    A run that resumes after the loss of a machine may call this before Ray has noticed the loss.
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
    """Return Ray's answer about its machines; raise ResourceError on a timeout."""
    try:
        return run_within(question, ANSWER_SECONDS)
    except TimeoutError:
        raise ResourceError(
            f"Ray has not listed its machines within {ANSWER_SECONDS:g} s; check its head "
            "(gcs_server), or end it with ray stop"
        ) from None


def _count_free_gpus(enough: int) -> int:
    """Return the number of free GPUs; wait for GPUs of processes that just ended."""
    deadline = time.monotonic() + RELEASE_SECONDS
    while True:
        free = int(_ask(ray.available_resources).get("GPU", 0))
        if free >= enough or time.monotonic() >= deadline:
            return free
        time.sleep(RELEASE_POLL_SECONDS)


class Starter:
    """Start processes of one kind."""

    def __init__(self, program: Any, add_process: Callable[[Any], None]) -> None:
        self._program = program
        self._add_process = add_process

    def start(self, *arguments: Any) -> Any:
        """Start one process; it loads nothing before its first request."""
        process = self._program.remote(*arguments)
        self._add_process(process)
        return process


def end_processes(processes: Sequence[Any]) -> None:
    """End processes immediately, even if they are waiting."""
    for process in processes:
        ray.kill(process)


def shut_down(error: BaseException | None = None) -> None:
    """End Ray within `SHUTDOWN_SECONDS`; a thread that is still stuck then is abandoned.

    If this takes more than a moment, first show the error that ended the run.
    """
    outcome = ThreadedCall(ray.shutdown)
    if outcome.done.wait(QUIET_SECONDS):
        return outcome.get()
    if isinstance(error, PracticumError) and error.exit_code:
        print(f"error: {error}", file=sys.stderr, flush=True)
        error.was_shown = True
    if outcome.done.wait(SHUTDOWN_SECONDS - QUIET_SECONDS):
        return outcome.get()
    log.warning(f"Ray did not end within {SHUTDOWN_SECONDS:g} s; it is abandoned")
    # Ray would call it again at the end of the process, and be stuck again.
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
    """Kill the processes on this machine by process id: Ray's own shutdown may not reach them."""
    for sign in signs:
        if sign.host == socket.gethostname():
            _kill_if_rays(sign.pid)


def _kill_if_rays(pid: int) -> None:
    """Kill a process unless its process id belongs to a program that is not Ray's."""
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
    """Yield the processes that a process started, and their descendants."""
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                yield from _find_descendants(child)
                yield child


def connect(object_store_memory: int | None = None, num_gpus: int | None = None) -> None:
    """Join the cluster named by RAY_ADDRESS or this machine, or start one on only this machine.

    Both numbers apply to a cluster that is started here; by default Ray detects them.

    Raises ResourceError if the cluster cannot be reached.
    """
    handler = signal.getsignal(signal.SIGTERM)
    # Processes without a GPU keep the driver's environment; Ray warns that this will change.
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
        remedy = "start it with ray start --head, or unset RAY_ADDRESS to use only this machine"
        if "ersion mismatch" in reason:
            remedy = "install the same versions of Python and Ray on all machines"
        elif "Failed to connect" in reason and "RAY_AUTH_MODE" not in os.environ:
            # The address answers. Ray only sends its token to a named address if it is configured
            # to.
            remedy = (
                "if it asks for a token, set RAY_AUTH_MODE=token, with its ~/.ray/auth_token here"
            )
        raise ResourceError(f"the Ray cluster cannot be reached ({reason}); {remedy}") from error
    finally:
        # Ray ends the process on SIGTERM, but a run saves its state first.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _knock(address: str) -> None:
    """Raise OSError if nothing answers at HOST:PORT; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if "/" not in host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
