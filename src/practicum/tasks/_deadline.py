"""Verifiers of other packages in a process of their own, which is killed when it takes too long.

They call symbolic mathematics on whatever a model wrote, and that can run for ever. Requests and answers are lines of
JSON over pipes; the process ends when its input is closed or its time is up, so it never outlives the run.
"""

import json
import os
import selectors
import subprocess
import sys
import threading
import weakref
from typing import Any

from practicum.errors import DataError, VerifierError

SECONDS = 5.0
START_SECONDS = 60.0
FAILURES_ALLOWED = 3
# What Python needs to start; secrets in the environment stay out of a process that reads what a model wrote.
_ENVIRONMENT = (
    "PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
    "HOME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "LD_LIBRARY_PATH",
)


class NoAnswer(Exception):
    """The process took too long, or ended."""


class Failed(Exception):
    """The process answered that it failed on this request."""


class Deadline:
    """A module that calls `practicum.tasks._worker.serve`, run as `python -m MODULE`; a call that is too slow scores 0.

    `timeouts` counts the calls that were killed or died, `errors` those on which the verifier failed.
    """

    def __init__(self, module: str, *arguments: str, seconds: float = SECONDS) -> None:
        self.timeouts = 0
        self.errors = 0
        self._module = module
        # -P: a file of the current folder must not stand in for a package.
        self._command = [sys.executable, "-P", "-m", module, *arguments]
        self._seconds = seconds
        self._in_a_row = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._end = weakref.finalize(self, int)
        self._lock = threading.Lock()

    def call(self, request: dict[str, Any]) -> float:
        """The score, 0 where the verifier is too slow or fails; VerifierError when it is too slow several times in a row."""
        try:
            score = float(self.ask(request, self._seconds))
        except Failed:
            # Odd text from a model is data and not a fault of the run.
            self.errors += 1
            score = 0.0
        except NoAnswer as reason:
            self.timeouts += 1
            self._in_a_row += 1
            if self._in_a_row >= FAILURES_ALLOWED:
                raise VerifierError(
                    f"the verifier {self._module} gave no answer {self._in_a_row} times in a row ({reason}); "
                    "use another verifier, or shorten rollout.max_new_tokens"
                ) from reason
            return 0.0
        self._in_a_row = 0
        return score

    def ask(self, request: dict[str, Any], seconds: float) -> Any:
        """The answer to one request; NoAnswer, Failed, or DataError where the process cannot serve at all."""
        with self._lock:
            answer = self._exchange(request, seconds)
        if "refused" in answer:
            raise DataError(answer["refused"])
        if "failed" in answer:
            raise Failed(answer["failed"])
        return answer["value"]

    def close(self) -> None:
        """End the process."""
        self._end()
        self._process = None

    def _exchange(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        process = self._process or self._start()
        line = json.dumps({"seconds": seconds, "request": request}).encode() + b"\n"
        assert process.stdin is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except OSError as error:
            self.close()
            raise NoAnswer("its process ended by itself") from error
        return self._line(process, seconds)

    def _start(self) -> subprocess.Popen[bytes]:
        kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Some generators iterate over sets of strings: without a fixed hash seed they differ from run to run.
            env={**kept, "PYTHONHASHSEED": "0"},
            # Ctrl-C is for the run, which finishes its step and still needs its verifier.
            start_new_session=True,
        )
        self._process = process
        self._end = weakref.finalize(self, _end, process)
        try:
            self._line(process, START_SECONDS)
        except NoAnswer as reason:
            raise VerifierError(
                f"the verifier {self._module} did not start ({reason}); to see why, run: {' '.join(self._command)}"
            ) from reason
        return process

    def _line(self, process: subprocess.Popen[bytes], seconds: float) -> dict[str, Any]:
        """The next answer; NoAnswer after killing a process that gave none in time."""
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout=seconds):
                self.close()
                raise NoAnswer(f"over {seconds:g} s")
        line = process.stdout.readline()
        if not line:
            self.close()
            raise NoAnswer("its process ended by itself")
        return json.loads(line)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:
                # A request that was never read is still in the buffer.
                continue
