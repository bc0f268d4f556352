"""The GPUs of a cluster are counted before a process takes one, and a cluster that cannot be joined is reported."""

import itertools
import re
import socket
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from toy import toy_recipe

from practicum.backends.ray import Config, calls, placement
from practicum.backends.ray.calls import AnswerLimits
from practicum.backends.ray.placement import RayCluster, Starter
from practicum.backends.ray.processes import ModelProcess
from practicum.errors import ResourceError, TooFewGpus, WorkerLost
from practicum.models.config import ScorerConfig
from practicum.runs.assembly import assemble_run

from .test_ray import on_ray

pytestmark = pytest.mark.long


def test_more_gpus_than_there_are_and_those_of_others_are_said_before_anything_starts(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "RELEASE_SECONDS", 0.0)
    monkeypatch.setattr(ray, "nodes", list)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 2.0})
    monkeypatch.setattr(ray, "available_resources", lambda: {"GPU": 2.0})
    with pytest.raises(
        TooFewGpus,
        match=r"^the recipe asks for 4 GPUs and the cluster has 2; lower backend.trainers, ",
    ):
        assemble_run(toy_recipe(models, on_ray() | {"student.model": {"hidden_size": 8}}), tmp_path)
    assert not any(tmp_path.iterdir()), "a model was made from scratch before it was refused"
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 8.0})
    monkeypatch.setattr(ray, "available_resources", lambda: {"GPU": 3.0})
    with pytest.raises(
        TooFewGpus, match=r"^4 GPUs are needed and 3 of 8 are free; another run may hold the rest"
    ):
        assemble_run(toy_recipe(models, on_ray()), tmp_path)


def test_the_gpu_of_a_teacher_that_comes_back_late_is_waited_for(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Begun(Exception):
        pass

    def begin(*arguments: object) -> None:
        raise Begun

    free = [3.0, 3.0, 3.0, 4.0]
    monkeypatch.setattr(placement, "RELEASE_POLL_SECONDS", 0.0)
    monkeypatch.setattr(ray, "nodes", list)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 4.0})
    monkeypatch.setattr(ray, "available_resources", lambda: {"GPU": free.pop(0)})
    monkeypatch.setattr(Starter, "start", begin)
    with pytest.raises(Begun):
        assemble_run(toy_recipe(models, on_ray()), tmp_path)
    assert not free


def test_gpus_are_counted_once_ray_has_given_up_a_machine_that_is_gone(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray counts the GPUs of a lost machine for half a minute, and would wait for them."""
    counts: list[int] = []

    def answer() -> None:
        with suppress(OSError):
            while True:
                here.accept()[0].close()

    def list_nodes() -> list[dict[str, Any]]:
        counts.append(1)
        machines = [(here.getsockname()[1], True), (gone, len(counts) < 3)]
        return [
            {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port, "Alive": is_alive}
            for port, is_alive in machines
        ]

    monkeypatch.setattr(placement, "FAREWELL_POLL_SECONDS", 0.0)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", list_nodes)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 4.0 if len(counts) < 3 else 3.0})
    with socket.create_server(("127.0.0.1", 0)) as here, socket.socket() as unused:
        threading.Thread(target=answer, daemon=True).start()
        unused.bind(("127.0.0.1", 0))
        gone = unused.getsockname()[1]
        with pytest.raises(TooFewGpus, match="asks for 4 GPUs and the cluster has 3") as lack:
            assemble_run(toy_recipe(models, on_ray()), tmp_path)
        assert lack.value.overrides == ("backend.trainers=1",)
        counts.clear()
        monkeypatch.setattr(placement, "FAREWELL_SECONDS", 0.0)
        with pytest.raises(
            ResourceError, match=rf"^127.0.0.1:{gone} belongs to the Ray cluster and"
        ):
            assemble_run(toy_recipe(models, on_ray()), tmp_path)


def test_a_process_that_went_with_a_machine_is_not_waited_for_until_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray restarts it where a GPU is free; without a free GPU, it would wait for half an hour."""
    gpus = [3.0, 4.0, 3.0, 3.0, 3.0]
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", list)
    for name in ("cluster_resources", "available_resources"):
        monkeypatch.setattr(ray, name, lambda: {"GPU": 4.0})
    with ExitStack() as at_end:
        cluster = RayCluster(at_end)
        cluster.announce((4, ScorerConfig(model="m")))
        cluster.reserve(ModelProcess, 4, ScorerConfig(model="m"))
        limits = AnswerLimits(1800.0, 2, cluster.count_missing)
        clock = itertools.count(0.0, 20.0)
        monkeypatch.setattr(calls, "REPLACEMENT_SECONDS", 50.0)
        monkeypatch.setattr(calls.time, "monotonic", lambda: next(clock))
        monkeypatch.setattr(ray, "wait", lambda waiting, **settings: ([], waiting))
        monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": gpus.pop(0)})
        with pytest.raises(
            WorkerLost,
            match=r"^1 of the GPUs of this run left the cluster, and sample waits for a process",
        ) as loss:
            calls.wait_for({"sampler 0": object()}, "sample", limits)
    assert loss.value.restarts == 2 and len(gpus) < 3


@pytest.mark.parametrize(
    ("trainers", "nodes", "missing", "fits"),
    [
        (4, 1, 1, ["backend.trainers=3"]),
        (4, 1, 4, []),
        (16, 2, 8, ["backend.trainers=8", "backend.nodes=1"]),
        (12, 3, 1, ["backend.trainers=8", "backend.nodes=2"]),
        (4, 2, 3, ["backend.trainers=1", "backend.nodes=1"]),
    ],
)
def test_fewer_trainers_keep_the_size_of_their_shards(
    trainers: int, nodes: int, missing: int, fits: list[str]
) -> None:
    assert Config(trainers=trainers, nodes=nodes).list_smaller(missing) == fits


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        (
            "Could not find\n any instance at 10.0.0.9:6379",
            "start it with ray start --head, or unset",
        ),
        (
            "Version mismatch: Ray: 2.1.0\n Python: 3.9",
            "install the same versions of Python and Ray",
        ),
        (
            "Failed to connect to Ray cluster at 10.0.0.9:6379",
            "if it asks for a token, set RAY_AUTH_MODE=token, with its ~/.ray/auth_token here",
        ),
    ],
)
def test_a_cluster_that_cannot_be_joined_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, reason: str, remedy: str
) -> None:
    def refuse(**settings: object) -> None:
        raise RuntimeError(reason)

    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setattr(ray, "init", refuse)
    line = f"the Ray cluster cannot be reached ({' '.join(reason.split())}); {remedy}"
    with pytest.raises(ResourceError, match=f"^{re.escape(line)}"):
        placement.connect()


def test_an_address_where_nothing_listens_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(
            ResourceError, match=r"^the Ray cluster cannot be reached \(.*refused\)"
        ):
            placement.connect()
