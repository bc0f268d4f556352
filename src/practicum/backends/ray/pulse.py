"""Watch for signs of life: a thread polls a run's processes and machines to find a stuck one.

A stopped process keeps its connections, and Ray waits for it forever. Ray notices a stopped process
among its services (raylet, gcs_server) after a minute or not at all.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError

from practicum.backends._sharded.silence import describe_process

T = TypeVar("T")

BEAT_SECONDS = 2.0
"""The time between two questions to each process and machine."""

LARGEST_GAP = 5.0
"""The maximum that one poll adds to a silence: the driver itself may have been stopped."""

KNOCK_SECONDS = 2.0
"""The time in which a running machine accepts a connection and Ray's process answers on it."""

HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
"""The first bytes of an HTTP/2 client without settings; a gRPC server answers with its settings."""

ALIVE = 2
"""The state of a process that was started and has not died, as a number of Ray's protocol."""

Answer = Literal["answers", "silent", "gone"]


class Sign(NamedTuple):
    """A sign of life: the id of a process, the name of its machine, Ray's node, and its work."""

    pid: int
    host: str
    node: str
    work: str

    @classmethod
    def give(cls, work: str) -> "Sign":
        """Return the sign of this process."""
        node = ray.get_runtime_context().get_node_id()
        return cls(os.getpid(), socket.gethostname(), node, work)


def knock(address: tuple[str, int], seconds: float = KNOCK_SECONDS) -> Answer:
    """Find out whether a process of Ray answers at an address.

    The kernel accepts connections for a stopped process, so an accepted connection is not an
    answer.
    """
    try:
        connection = socket.create_connection(address, seconds)
    except OSError:
        return "gone"
    with connection:
        try:
            connection.settimeout(seconds)
            connection.sendall(HELLO)
            connection.recv(1)
        except TimeoutError:
            return "silent"
        except OSError:
            # The process closed the connection, as with TLS; a stopped process does not.
            return "answers"
    return "answers"


def run_within(call: Callable[[], T], seconds: float) -> T:
    """Return the result of a call to Ray that takes no timeout.

    Raises TimeoutError after `seconds` seconds; the waiting thread is abandoned.
    """
    outcome = ThreadedCall(call)
    if not outcome.done.wait(seconds):
        raise TimeoutError
    return outcome.get()


class ThreadedCall:
    """A call in a separate thread, which ends with the process at the latest."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, args=(call,), daemon=True).start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._result = call()
        except BaseException as error:
            self._error = error
        self.done.set()

    def get(self) -> Any:
        """Return the result of a call that is done, or raise its error."""
        if self._error is not None:
            raise self._error
        return self._result


@dataclass(slots=True)
class _Watched:
    """A process with its newest sign, the open question to it, and the seconds without an answer."""

    title: str
    process: Any
    sign: Sign | None = None
    question: Any = None
    silence: float = 0.0

    def ask(self, elapsed: float) -> None:
        """Read the answer to the last question, or count the time without one; ask again."""
        if self.question is not None:
            ready, _ = ray.wait([self.question], timeout=0, fetch_local=False)
            if not ready:
                # Ray restarts the process or gives it up by itself.
                is_alive = self.process._get_local_state() == ALIVE
                self.silence = self.silence + elapsed if is_alive else 0.0
                return
            try:
                self.sign = ray.get(self.question, timeout=KNOCK_SECONDS)
            except (RayError, GetTimeoutError):
                self.sign = None
        self.silence = 0.0
        self.question = self.process.give_sign.remote()


@dataclass(slots=True)
class Pulse:
    """The signs of life of a run's processes and machines.

    A process counts as stuck after a silence of `limit` seconds.
    """

    limit: float
    _watched: dict[str, _Watched] = field(default_factory=dict)
    _addresses: dict[str, tuple[str, int]] = field(default_factory=dict)
    _machines: dict[str, float] = field(default_factory=dict)
    _gone: set[str] = field(default_factory=set)
    _stuck: str = ""
    _is_over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def watch(self, title: str, process: Any) -> None:
        """Start to poll a process."""
        self._watched[title] = _Watched(title, process)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop polling."""
        self._is_over.set()

    def list_signs(self) -> list[Sign]:
        """Return the newest sign of each process that gave one."""
        return [watched.sign for watched in self._watched.values() if watched.sign is not None]

    def find_sign(self, title: str) -> Sign | None:
        """Return the newest sign of a process, None if it gave none."""
        return self._watched[title].sign

    def find_stuck(self) -> str:
        """Name the process or the machine that gave no sign for `limit` seconds; empty if none."""
        return self._stuck

    def _work(self) -> None:
        last = time.monotonic()
        with ThreadPoolExecutor(8) as knockers:
            while not self._is_over.wait(BEAT_SECONDS):
                moment = time.monotonic()
                self._beat(min(moment - last, LARGEST_GAP), knockers)
                last = moment

    def _beat(self, elapsed: float, knockers: ThreadPoolExecutor) -> None:
        """Poll all processes and machines once."""
        for watched in list(self._watched.values()):
            watched.ask(elapsed)
        self._find_addresses()
        answers = dict(
            zip(self._addresses, knockers.map(knock, self._addresses.values()), strict=True)
        )
        self._gone = {name for name, answer in answers.items() if answer == "gone"}
        for name, answer in answers.items():
            before = self._machines.get(name, 0.0)
            self._machines[name] = before + elapsed if answer == "silent" else 0.0
        self._stuck = self._name_stuck()

    def _find_addresses(self) -> None:
        """Find the addresses of Ray's processes on the machines of the signs, and on this one."""
        context = ray.get_runtime_context()
        needed = {context.get_node_id(), *(sign.node for sign in self.list_signs())}
        if needed <= self._addresses.keys():
            return
        host, _, port = context.gcs_address.rpartition(":")
        self._addresses[""] = (host.strip("[]"), int(port))
        try:
            nodes = run_within(ray.nodes, KNOCK_SECONDS)
        except TimeoutError:
            return
        for node in nodes:
            if node["Alive"] and node["NodeID"] in needed:
                address = (node["NodeManagerAddress"], node["NodeManagerPort"])
                self._addresses[node["NodeID"]] = address

    def _name_stuck(self) -> str:
        for node, silence in self._machines.items():
            if silence >= self.limit:
                host, port = self._addresses[node]
                program = "raylet" if node else "gcs_server"
                return f"Ray's own process {program} at {host}:{port}"
        for watched in self._watched.values():
            sign = watched.sign
            # The processes of a lost machine are lost too: Ray gives them up by itself.
            if watched.silence < self.limit or (sign is not None and sign.node in self._gone):
                continue
            if sign is None:
                return watched.title
            return describe_process(watched.title, sign.pid, sign.host, sign.work)
        return ""
