"""Connect to a Ray cluster or start one, and place processes on its GPUs."""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import ray
import torch
from ray.exceptions import RayError

from practicum.errors import ResourceError, TooFewGpus
from practicum.models.config import ModelConfig

RETRIES = 3
"""Times that a process without state of its own is started again, and a request repeated."""


RELEASE_SECONDS = 10.0
"""The time in which Ray notices that the GPUs of ended processes are free."""

RELEASE_POLL_SECONDS = 0.2


KNOCK_SECONDS = 10.0
"""The time in which the cluster of RAY_ADDRESS, or a machine of it, takes a connection."""

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
        self, at_end: ExitStack, list_smaller: Callable[[int], list[str]] = lambda missing: []
    ) -> None:
        """`list_smaller` lists the changes to a recipe with which it does without some GPUs."""
        self._list_smaller = list_smaller
        self._processes: list[Any] = []
        if not ray.is_initialized():
            connect()
            SharedRay.was_started = True
        SharedRay.users += 1
        at_end.callback(self.end)
        _await_farewells()
        self._gpus = int(ray.cluster_resources().get("GPU", 0))
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
        return max(self._reserved - int(ray.cluster_resources().get("GPU", 0)), 0)

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

    def end(self) -> None:
        """End all processes, and the connection if no other run of this process uses it."""
        end_processes(self._processes)
        self._processes.clear()
        SharedRay.users -= 1
        if SharedRay.was_started and SharedRay.users == 0:
            SharedRay.was_started = False
            ray.shutdown()


def _await_farewells() -> None:
    """Wait until Ray has given up the machines that do not answer, whose GPUs it counts until then.

    A run that goes on after a machine was lost comes here before Ray knows of the loss.
    """
    deadline = time.monotonic() + FAREWELL_SECONDS
    while silent := [address for address in _list_machines() if not _answers(address)]:
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
        for node in ray.nodes()
        if node["Alive"]
    ]


def _answers(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, KNOCK_SECONDS).close()
    except OSError:
        return False
    return True


def _count_free_gpus(enough: int) -> int:
    """Return the GPUs that no process holds; those of processes that just ended come back late."""
    deadline = time.monotonic() + RELEASE_SECONDS
    while True:
        free = int(ray.available_resources().get("GPU", 0))
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
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_SECONDS).close()
