"""Connect to a Ray cluster or start one, and place processes on its GPUs."""

import logging
import os
import signal
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import ray
import torch
from ray.exceptions import RayError

from practicum.errors import ResourceError
from practicum.models.config import ModelConfig

RETRIES = 3
"""Times that a process without state of its own is started again, and a request repeated."""


class SharedRay:
    """The connection of this process to Ray, which several runs may share.

    It ends with its last user, unless Ray was connected before the first one.
    """

    users = 0
    was_started = False


class RayCluster:
    """A connection to Ray; the processes that it started end with it."""

    def __init__(self, at_end: ExitStack) -> None:
        self._processes: list[Any] = []
        if not ray.is_initialized():
            connect()
            SharedRay.was_started = True
        SharedRay.users += 1
        at_end.callback(self.end)
        self._gpus = int(ray.cluster_resources().get("GPU", 0))
        self._wanted = 0

    def reserve(self, program: type, count: int, config: ModelConfig, **options: Any) -> "Starter":
        """Reserve a GPU for each of `count` processes of a model, if it is to be on GPUs.

        Raises ResourceError if the cluster has fewer.
        """
        gpus = 1 if self._should_use_gpus(config) else 0
        self._wanted += gpus * count
        if self._wanted > self._gpus:
            raise ResourceError(
                f"the recipe asks for {self._wanted} GPUs and the cluster has {self._gpus}; lower "
                "backend.trainers or backend.samplers, or join more machines with ray start"
            )
        free = int(ray.available_resources().get("GPU", 0))
        if gpus and count > free:
            raise ResourceError(
                f"{count} GPUs are needed and {free} of {self._gpus} are free; another run may hold "
                "the others: wait for it, or ask for fewer"
            )
        return Starter(ray.remote(num_cpus=0, num_gpus=gpus, **options)(program), self._processes)

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


class Starter:
    """Starts processes of one kind."""

    def __init__(self, program: Any, processes: list[Any]) -> None:
        self._program = program
        self._processes = processes

    def start(self, *arguments: Any) -> Any:
        """Start one process; it loads nothing before its first request."""
        process = self._program.remote(*arguments)
        self._processes.append(process)
        return process


def end_processes(processes: Sequence[Any]) -> None:
    """End processes at once, whatever they are waiting for."""
    for process in processes:
        ray.kill(process)


def connect(object_store_memory: int | None = None) -> None:
    """Join the cluster that RAY_ADDRESS or this machine names, or start one of this machine alone.

    Raises ResourceError if it cannot be reached.
    """
    handler = signal.getsignal(signal.SIGTERM)
    # Without a GPU of their own, processes keep the driver's environment; Ray warns of a change.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        ray.init(
            include_dashboard=None if "RAY_ADDRESS" in os.environ else False,
            log_to_driver=False,
            object_store_memory=object_store_memory,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(torch.get_num_threads())}},
        )
    except (RayError, ConnectionError, RuntimeError) as error:
        raise ResourceError(
            f"the Ray cluster cannot be reached ({' '.join(str(error).split())[:200]}); start it with "
            "ray start --head, or unset RAY_ADDRESS to use this machine alone"
        ) from error
    finally:
        # Ray ends the process on SIGTERM; a run saves its state first.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
