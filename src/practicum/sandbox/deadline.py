"""Verifiers of other packages, each in a sandboxed process that is killed when anything is wrong.

They run symbolic mathematics on text of a model: that can run for ever, and it can be an attack.
Requests and answers are lines of JSON over pipes. An answer counts only if it is one line with the
random id of its request and comes in time. After anything else the process is killed, so that no
part of one answer can pass for the answer to another request.
"""

import json
import os
import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from practicum.errors import DataError, SandboxError, VerifierError
from practicum.ports.gate import Kind, reject
from practicum.sandbox import (
    LAUNCHER,
    NoLine,
    ProcessLimits,
    Sandbox,
    SandboxedProcess,
    TooSlow,
    find_places,
    missing,
)

Walls = Literal["require", "best_effort"]
"""The choice between refusing a verifier if a wall around it is missing, and running without it."""

OwnWalls = Literal["require", "best_effort", "off"]
"""The same for a verifier of the user's, which may also run without any wall."""

SECONDS = 5.0
START_SECONDS = 60.0
LARGEST_SCORE = 4 << 10
"""Bytes of a line with a score, or with a verifier's reason for failing."""
LARGEST_ANSWER = 64 << 20
"""Bytes of any other line; a task's question may be long."""

# What Python needs to start. Secrets in the environment stay out of a process that reads text of a
# model.
_ENVIRONMENT = (
    *("PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"),
    *("LANG", "LC_ALL", "LD_LIBRARY_PATH"),
)


class VerifierFailed(Exception):
    """The process answered that the verifier failed on this request."""


@dataclass(frozen=True, slots=True)
class Canary:
    """A request with a known score, sent to each new process: a broken verifier scores it wrong."""

    request: dict[str, Any]
    score: float


class VerifierProcess:
    """A module that calls `practicum.sandbox.worker.serve`, run as `python -m MODULE` in a sandbox.

    Text of a model never ends the run: a call that is too slow or fails scores 0, or the end of the
    range `scores` that is nearest to 0. `timeouts` counts the calls without an answer, `errors` the
    calls in which the verifier failed or gave no score. The process can import installed packages,
    and from the folders of PYTHONPATH or of `path` its module, the modules `imports` and their
    imports. Errors and rejections call the process by `what` it is, since a tool runs in the same
    way, and by `name`, or the module without one. A module that `forks` calls
    `practicum.sandbox.worker.serve_apart`. A process that `pauses` is stopped between calls, with all
    its threads, and a call may take `seconds` of processor time.
    """

    def __init__(  # noqa: PLR0913  (the settings of one process, one by one)
        self,
        module: str,
        *arguments: str,
        seconds: float = SECONDS,
        canary: Canary | None = None,
        sandbox: OwnWalls = "require",
        scores: tuple[float, float] = (0.0, 1.0),
        path: Sequence[str] | None = None,
        limits: ProcessLimits | None = None,
        what: str = "verifier",
        name: str | None = None,
        imports: Sequence[str] = (),
        forks: bool = False,
        pauses: bool = False,
    ) -> None:
        self.timeouts = 0
        self.errors = 0
        self._module = module
        # -P, so that a file of the current folder cannot take the place of a package.
        self._command = [sys.executable, "-P", "-m", module, *arguments]
        self._seconds = seconds
        self._canary = canary
        self._sandbox = Sandbox(
            limits or ProcessLimits(),
            required=sandbox == "require",
            walls=sandbox != "off",
            forks=forks,
        )
        self._imports = tuple(imports)
        self._pauses = pauses and sandbox != "off"
        self._title = f"{what} {name or module}"
        self._scores = scores
        self._path = path
        self._process: SandboxedProcess | None = None
        self._lock = threading.Lock()

    def call(
        self, request: dict[str, Any], report: Callable[[str], None] = lambda reason: None
    ) -> float:
        """Return the score, or the score of a failure if the verifier is too slow or fails.

        `report` gets the reason of a failure. VerifierError if the process does not start.
        """
        try:
            with self._lock:
                answer = self._exchange(request, self._seconds, LARGEST_SCORE)
        except NoLine as reason:
            self.timeouts += 1
            return self._fail("time" if isinstance(reason, TooSlow) else "error", reason, report)
        # A bad score is no fault of the run: a model can write text that breaks its verifier.
        problem = answer.get("failed") or find_score_problem(answer.get("value"), self._scores)
        if problem is None:
            return float(answer["value"])
        self.errors += 1
        return self._fail("error" if "failed" in answer else "number", problem, report)

    def _fail(self, kind: Kind, reason: object, report: Callable[[str], None]) -> float:
        """Count a call without a score, and return the score of a failure."""
        reject(kind, f"the {self._title}: {reason}")
        report(str(reason))
        return score_failure(self._scores)

    def start(self) -> None:
        """Start the process now, so that what it cannot do is known before a run.

        VerifierError if it does not start, DataError if it refuses to serve.
        """
        with self._lock:
            if self._process is None:
                self._start()

    def ask(self, request: dict[str, Any], seconds: float, largest: int = LARGEST_ANSWER) -> Any:
        """Return the answer to a request, of at most `largest` bytes.

        Errors: NoLine without an answer, VerifierFailed, DataError if the process refuses to serve.
        """
        with self._lock:
            answer = self._exchange(request, seconds, largest)
        if "refused" in answer:
            raise DataError(answer["refused"])
        if "failed" in answer:
            raise VerifierFailed(answer["failed"])
        return answer["value"]

    def check_walls(self) -> str | None:
        """Return a note on missing walls, or None; SandboxError if the sandbox requires them."""
        lacks = "; ".join(missing()) if self._sandbox.walls else ""
        if lacks and self._sandbox.required:
            raise SandboxError(
                f"the {self._title} is not started, because this machine cannot wall off "
                f"{lacks}; use another machine, or write sandbox: best_effort under task to do "
                "without these walls"
            )
        return f"the {self._title} runs without a wall around {lacks}" if lacks else None

    def close(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.close()
        self._process = None

    def _exchange(self, request: dict[str, Any], seconds: float, largest: int) -> dict[str, Any]:
        """Return the answer to one request; raise NoLine after killing a process that gave none."""
        if self._process is not None and not self._process.is_idle():
            # It has ended, or wrote a line without a request, which must not be read as an answer.
            self.close()
        process = self._process or self._start()
        if not self._pauses:
            return self._request(process, request, seconds, largest)
        process.resume(seconds)
        answer = self._request(process, request, seconds, largest)
        # The threads that a program left behind stop with it.
        process.pause()
        return answer

    def _request(
        self, process: SandboxedProcess, request: dict[str, Any], seconds: float, largest: int
    ) -> dict[str, Any]:
        request_id = secrets.token_hex(16)
        try:
            process.send(json.dumps({"id": request_id, "request": request}).encode(), seconds)
            answer = _parse(process.receive(seconds, largest))
            if answer.get("id") != request_id or not answer.keys() & {"value", "failed", "refused"}:
                raise NoLine("an answer to no request")
        except NoLine:
            self.close()
            raise
        return answer

    def _start(self) -> SandboxedProcess:
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        if "PYTHONPATH" in environment:
            # The process has another working folder, so relative entries would point elsewhere.
            folders = environment["PYTHONPATH"].split(os.pathsep)
            environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, filter(None, folders)))
        path = environment.get("PYTHONPATH", "").split(os.pathsep)
        path = [*filter(None, path), *map(os.path.abspath, sys.path)]
        if self._path is not None:
            path = list(map(os.path.abspath, self._path))
            environment["PYTHONPATH"] = os.pathsep.join(path)
        places = find_places((self._module, *self._imports), tuple(path))
        if self._sandbox.walls:
            # Folders of the user's may hold data and keys: only what is imported can be read.
            environment.pop("PYTHONPATH", None)
        # Some generators iterate over sets of strings: without a fixed hash seed they differ from
        # run to run. One thread is fastest for the small arrays of verifiers.
        environment |= {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.check_walls()
        launched = [sys.executable, "-P", LAUNCHER, json.dumps(dict(places)), *self._command[3:]]
        self._process = process = self._sandbox.start(launched, environment, tuple(places.values()))
        try:
            if not _parse(process.receive(START_SECONDS, LARGEST_SCORE)).get("ready"):
                raise NoLine("not a word of being ready")
            if self._canary is not None:
                answer = self._request(process, self._canary.request, START_SECONDS, LARGEST_SCORE)
                if "refused" in answer:
                    self.close()
                    raise DataError(answer["refused"])
                if answer.get("value") != self._canary.score:
                    raise NoLine(
                        f"scores a right answer with {answer.get('value', answer.get('failed'))}"
                    )
        except NoLine as reason:
            self.close()
            raise VerifierError(
                f"the {self._title} did not start ({reason}); to see why, run: "
                f"{' '.join(self._command)}"
            ) from reason
        return process


def find_score_problem(score: Any, scores: tuple[float, float]) -> str | None:
    """Return what is wrong with the score that a verifier gave, or None."""
    # A bool is an int in Python. NaN is not within any range.
    if not isinstance(score, int | float) or isinstance(score, bool):
        return f"it returned {score!r:.80}, which is no number"
    low, high = scores
    if low <= score <= high:
        return None
    # Python refuses to print an integer of thousands of digits.
    digits = f"{score:g}" if isinstance(score, float) or abs(score) < 1e15 else "a huge number"
    return f"it returned {digits}, which is not from {low:g} to {high:g}"


def score_failure(scores: tuple[float, float]) -> float:
    """Return the score after a verifier failed: 0, or the end of the range closest to 0."""
    low, high = scores
    return min(max(0.0, low), high)


def _parse(line: bytes) -> dict[str, Any]:
    """Parse a line with a JSON object; raise NoLine for any other line."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise NoLine("no line of JSON")
    return answer
