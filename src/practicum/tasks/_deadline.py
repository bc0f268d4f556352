"""Verifiers of other packages in a sandboxed process of their own, which is killed when anything is wrong with it.

They call symbolic mathematics on whatever a model wrote: that can run for ever, and it can be an attack. Requests and answers
are lines of JSON over pipes. An answer counts only when it is one line with the id of its request, which is random, and comes in
time; after anything else the process is killed, so that nothing of one request can be taken for the answer to another.
"""

import json
import os
import secrets
import sys
import threading
from dataclasses import dataclass
from typing import Any, Literal

from practicum.errors import DataError, SandboxError, VerifierError
from practicum.sandbox import NoLine, Sandbox, SandboxedProcess, missing

Walls = Literal["require", "best_effort"]
"""Of a verifier: whether it is refused where a wall around it is missing, or runs without that wall."""

SECONDS = 5.0
START_SECONDS = 60.0
LARGEST_SCORE = 4 << 10
"""Bytes of a line with a score, or with what a verifier says on failing."""
LARGEST_ANSWER = 64 << 20
"""Bytes of any other line; an item of a task may be long."""
# What Python needs to start; secrets in the environment stay out of a process that reads what a model wrote.
_ENVIRONMENT = (
    "PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
)


class VerifierFailed(Exception):
    """The process answered that it failed on this request."""


@dataclass(frozen=True, slots=True)
class Canary:
    """A request whose answer is known, asked of every process that starts: a verifier that fails it is broken."""

    request: dict[str, Any]
    score: float


class VerifierProcess:
    """A module that calls `practicum.tasks._worker.serve`, run as `python -m MODULE` in a sandbox.

    No call ends the run because of what a model wrote: a call that is too slow or fails in any way scores 0. `timeouts` counts
    the calls that had no answer, `errors` those on which the verifier failed or gave no score. `lowest` and `highest`
    are the range of the verifier's scores.
    """

    lowest = 0.0
    highest = 1.0

    def __init__(
        self,
        module: str,
        *arguments: str,
        seconds: float = SECONDS,
        canary: Canary | None = None,
        sandbox: Walls = "require",
    ) -> None:
        self.timeouts = 0
        self.errors = 0
        self._module = module
        # -P: a file of the current folder must not stand in for a package.
        self._command = [sys.executable, "-P", "-m", module, *arguments]
        self._seconds = seconds
        self._canary = canary
        self._sandbox = Sandbox(required=sandbox == "require")
        self._process: SandboxedProcess | None = None
        self._lock = threading.Lock()

    def call(self, request: dict[str, Any]) -> float:
        """Return the score, 0 where the verifier is too slow or fails; raise VerifierError where it cannot serve at all."""
        try:
            with self._lock:
                answer = self._exchange(request, self._seconds, LARGEST_SCORE)
        except NoLine:
            self.timeouts += 1
            return 0.0
        score = answer.get("value")
        # Text of a model is data and not a fault of the run, whatever its verifier makes of it.
        if (
            isinstance(score, bool)
            or not isinstance(score, int | float)
            or not self.lowest <= score <= self.highest
        ):
            self.errors += 1
            return 0.0
        return float(score)

    def ask(self, request: dict[str, Any], seconds: float) -> Any:
        """Return the answer to a request without a model's text; raise NoLine, Failed, or DataError where it is refused."""
        with self._lock:
            answer = self._exchange(request, seconds, LARGEST_ANSWER)
        if "refused" in answer:
            raise DataError(answer["refused"])
        if "failed" in answer:
            raise VerifierFailed(answer["failed"])
        return answer["value"]

    def check_walls(self) -> str | None:
        """Return what to tell the user where walls are missing and may be, or None; raise SandboxError where they may not."""
        lacks = "; ".join(missing())
        if lacks and self._sandbox.required:
            raise SandboxError(
                f"the verifier {self._module} is not started, because this machine cannot wall off {lacks}; use another "
                "machine, or write sandbox: best_effort under task to do without these walls"
            )
        return f"the verifier {self._module} runs without a wall around {lacks}" if lacks else None

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()
        self._process = None

    def _exchange(self, request: dict[str, Any], seconds: float, largest: int) -> dict[str, Any]:
        """Return the answer to one request; raise NoLine after killing a process that gave none."""
        if self._process is not None and self._process.has_more():
            # Written after its last answer: by nobody who was asked.
            self.close()
        process = self._process or self._start()
        return self._answer(process, request, seconds, largest)

    def _answer(
        self, process: SandboxedProcess, request: dict[str, Any], seconds: float, largest: int
    ) -> dict[str, Any]:
        request_id = secrets.token_hex(16)
        try:
            process.send(json.dumps({"id": request_id, "request": request}).encode(), seconds)
            answer = _parsed(process.receive(seconds, largest))
            if answer.get("id") != request_id or not answer.keys() & {"value", "failed", "refused"}:
                raise NoLine("an answer to no request")
        except NoLine:
            self.close()
            raise
        return answer

    def _start(self) -> SandboxedProcess:
        kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        if "PYTHONPATH" in kept:
            # The process has another working folder.
            folders = kept["PYTHONPATH"].split(os.pathsep)
            kept["PYTHONPATH"] = os.pathsep.join(
                os.path.abspath(folder) for folder in folders if folder
            )
        # Some generators iterate over sets of strings: without a fixed hash seed they differ from run to run. One thread is
        # quickest for the small arrays of verifiers.
        fixed = {
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        self.check_walls()
        self._process = process = self._sandbox.start(self._command, {**kept, **fixed})
        try:
            if not _parsed(process.receive(START_SECONDS, LARGEST_SCORE)).get("ready"):
                raise NoLine("not a word of being ready")
            if self._canary is not None:
                answer = self._answer(process, self._canary.request, START_SECONDS, LARGEST_SCORE)
                if answer.get("value") != self._canary.score:
                    raise NoLine(
                        f"scores a right answer with {answer.get('value', answer.get('failed'))}"
                    )
        except NoLine as reason:
            self.close()
            raise VerifierError(
                f"the verifier {self._module} did not start ({reason}); to see why, run: {' '.join(self._command)}"
            ) from reason
        return process


def _parsed(line: bytes) -> dict[str, Any]:
    """Parse a line that is an object of JSON; raise NoLine for any other."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise NoLine("no line of JSON")
    return answer
