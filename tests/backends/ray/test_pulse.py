"""A process or a machine that is stuck is named in time, and a hanging call in Ray does not hold the run."""

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from toy import exit_status, start_fork

pytest.importorskip("ray")
import ray
from ray.exceptions import RayActorError

from practicum.backends.ray import Config, calls, placement, pulse
from practicum.backends.ray.calls import AnswerLimits, call_within, wait_for
from practicum.backends.ray.placement import RayCluster
from practicum.backends.ray.pulse import ALIVE, Pulse, Sign, knock, run_within
from practicum.core.leaving import LAST_ACTS, leave_if_stuck
from practicum.errors import ResourceError, WorkerLost

HERE = socket.gethostname()
RESTARTING = 3


class Process:
    """A double of an actor's handle; `answers` is its reply, and None means that it is stopped."""

    def __init__(self, answer: Any, state: int = ALIVE) -> None:
        self.answer, self.state = answer, state
        self.give_sign = SimpleNamespace(remote=lambda: self)

    def _get_local_state(self) -> int:
        return self.state


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace Ray by doubles, with heartbeats that take no time."""

    def get(process: Process, timeout: float | None = None) -> Any:
        if isinstance(process.answer, Exception):
            raise process.answer
        return process.answer

    def wait(processes: list[Process], **settings: object) -> tuple[list[Process], list[Process]]:
        ready = [process for process in processes if process.answer is not None]
        return ready, [process for process in processes if process.answer is None]

    context = SimpleNamespace(get_node_id=lambda: "node", gcs_address="127.0.0.1:1")
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "nodes", list)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(pulse, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(calls, "POLL_SECONDS", 0.01)


def await_stuck(watch: Pulse, seconds: float = 5.0) -> str:
    deadline = time.monotonic() + seconds
    while not (stuck := watch.find_stuck()) and time.monotonic() < deadline:
        time.sleep(0.01)
    watch.stop()
    return stuck


def test_a_server_that_accepts_and_says_nothing_is_told_from_one_that_is_gone() -> None:
    """The kernel accepts a connection for a stopped process."""
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        assert knock(stopped.getsockname(), 0.1) == "silent"
        gone = stopped.getsockname()
    assert knock(gone, 0.1) == "gone"
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            for reply in (b"\x00\x00\x06\x04", b""):
                connection, _ = server.accept()
                with connection:
                    assert connection.recv(64).startswith(b"PRI * HTTP/2.0")
                    connection.sendall(reply)

        thread = threading.Thread(target=greet)
        thread.start()
        # Settings, and an end of the connection, as of a server that expects TLS.
        assert [knock(server.getsockname(), 5.0) for _ in range(2)] == ["answers"] * 2
        thread.join()


@pytest.mark.usefixtures("quick")
def test_a_stopped_process_is_named_and_not_the_healthy_one() -> None:
    watch = Pulse(0.1)
    healthy, stopped = (
        Process(Sign(7, "vm", "node", "meet")),
        Process(Sign(8, "vm", "node", "load")),
    )
    watch.watch("trainer 0", healthy)
    watch.watch("trainer 1", stopped)
    while len(watch.list_signs()) < 2:
        time.sleep(0.01)
    assert not watch.find_stuck()
    stopped.answer = None
    assert await_stuck(watch) == "trainer 1 (process 8 on vm), last seen at load,"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("process", [Process(None, RESTARTING), Process(RayActorError())])
def test_a_process_that_ray_starts_again_or_gave_up_is_left_to_ray(process: Process) -> None:
    watch = Pulse(0.05)
    watch.watch("sampler 0", process)
    assert await_stuck(watch, 0.3) == ""


@pytest.mark.usefixtures("quick")
def test_a_stopped_raylet_is_named_and_not_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "KNOCK_SECONDS", 0.05)
    monkeypatch.setattr(pulse.knock, "__defaults__", (0.05,))
    watch = Pulse(0.2)
    with socket.create_server(("127.0.0.1", 0)) as raylet:
        port = raylet.getsockname()[1]
        node = {"NodeID": "node", "Alive": True}
        node |= {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}
        monkeypatch.setattr(ray, "nodes", lambda: [node])
        watch.watch("trainer 0", Process(Sign(7, "vm", "node", "load")))
        assert await_stuck(watch) == f"Ray's own process raylet at 127.0.0.1:{port}"


@pytest.mark.usefixtures("quick")
def test_a_request_ends_when_something_is_stuck_whatever_it_hangs_in() -> None:
    watch = Pulse(0.1)
    watch.watch("trainer 1", Process(None))
    limits = AnswerLimits(600.0, 2, pulse=watch)
    line = (
        r"^trainer 1 has given no sign of life for 0.1 s \(backend.silence\) while the run waited "
        r"for sample; check its machine, then resume from the newest checkpoint with"
    )
    with pytest.raises(WorkerLost, match=line) as loss:
        call_within(threading.Event().wait, "sample", limits)
    assert loss.value.restarts == 2
    with pytest.raises(WorkerLost, match=line):
        wait_for({"sampler 0": Process(None)}, "sample", limits)
    watch.stop()


@pytest.mark.usefixtures("quick")
def test_a_call_of_ray_has_a_deadline_and_a_start_has_its_own() -> None:
    limits = AnswerLimits(0.05, 0, starting=0.1)
    with pytest.raises(
        WorkerLost, match=r"^no answer to put in 0.05 s \(backend.patience\) from R"
    ):
        call_within(threading.Event().wait, "put", limits)
    late = r"^no answer to start in 0.1 s \(backend.start_patience\) from trainer 0 \(stuck: no s"
    with pytest.raises(WorkerLost, match=late):
        wait_for(
            {"trainer 0": Process(None)},
            "start",
            limits.for_start(),
            lambda title: "(stuck: no sign of life)",
        )
    assert Config().start_patience > Config().patience


def test_a_call_returns_its_result_or_its_error() -> None:
    assert run_within(lambda: 7, 5.0) == 7
    with pytest.raises(KeyError):
        run_within(lambda: {}[1], 5.0)
    with pytest.raises(TimeoutError):
        run_within(threading.Event().wait, 0.05)


def test_a_head_that_does_not_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", threading.Event().wait)
    with (
        ExitStack() as at_end,
        pytest.raises(ResourceError, match=r"has not listed its machines within 0\.05 s"),
    ):
        RayCluster(at_end)


@pytest.mark.parametrize("hangs", [True, False])
def test_the_error_is_shown_before_a_long_end_which_is_bounded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], hangs: bool
) -> None:
    monkeypatch.setattr(placement, "QUIET_SECONDS", 0.05)
    monkeypatch.setattr(placement, "SHUTDOWN_SECONDS", 0.2)
    monkeypatch.setattr(placement, "LAST_ACTS", acts := [])
    monkeypatch.setattr(ray, "shutdown", threading.Event().wait if hangs else lambda: None)
    error = WorkerLost("trainer 1 was lost")
    started = time.monotonic()
    placement.shut_down(error)
    assert time.monotonic() - started < 5.0
    assert capsys.readouterr().err == ("error: trainer 1 was lost\n" if hangs else "")
    assert error.was_shown == bool(acts) == hangs


def test_the_command_ends_with_its_code_although_something_is_stuck() -> None:
    def end() -> None:
        LAST_ACTS.append(lambda: None)
        threading.Thread(target=threading.Event().wait).start()
        leave_if_stuck(8)

    assert exit_status(os.waitpid(start_fork(end), 0)[1]) == 8


def test_only_processes_of_ray_are_killed_by_their_number() -> None:
    wait = [sys.executable, "-c", "import time; time.sleep(60)"]
    mine = subprocess.Popen(wait)
    rays = subprocess.Popen(["ray::TrainerRank", *wait[1:]], executable=sys.executable)
    try:
        deadline = time.monotonic() + 30
        while rays.poll() is None and time.monotonic() < deadline:
            signs = [Sign(process.pid, HERE, "node", "") for process in (mine, rays)]
            placement._kill_here([*signs, Sign(mine.pid, "elsewhere", "node", "")])
            time.sleep(0.05)
        assert rays.poll() == -9 and mine.poll() is None
        assert mine.pid in placement._find_descendants(os.getpid())
    finally:
        for process in (mine, rays):
            process.kill()
            process.wait()
