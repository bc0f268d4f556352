"""Verifiers of other packages in a process of their own, which is killed when it takes too long.

They call symbolic mathematics on whatever a model wrote, and that can run for ever. Requests and results are lines of
JSON over pipes; the process ends when its input is closed, so it never outlives the run.
"""

import atexit
import json
import selectors
import subprocess
import sys
from typing import Any

from practicum.errors import VerifierError

SECONDS = 5.0
START_SECONDS = 60.0
TIMEOUTS_ALLOWED = 3


class Deadline:
    """A module with `score(request) -> float`, run as `python -m MODULE`; a call that is too slow scores 0."""

    def __init__(self, module: str, *arguments: str, seconds: float = SECONDS) -> None:
        self.timeouts = 0
        self._command = [sys.executable, "-m", module, *arguments]
        self._seconds = seconds
        self._in_a_row = 0
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def call(self, request: dict[str, Any]) -> float:
        """The score; VerifierError when the verifier breaks, or is too slow several times in a row."""
        answer = self._exchange(request)
        if answer is None:
            self.timeouts += 1
            self._in_a_row += 1
            if self._in_a_row >= TIMEOUTS_ALLOWED:
                raise VerifierError(
                    f"the verifier {self._command[2]} took over {self._seconds:g} s {self._in_a_row} times in a row; "
                    "use another verifier, or shorten rollout.max_new_tokens"
                )
            return 0.0
        self._in_a_row = 0
        if "error" in answer:
            raise VerifierError(answer["error"])
        return float(answer["score"])

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process = None

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any] | None:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            if self._line(START_SECONDS) is None:
                raise VerifierError(f"the verifier {self._command[2]} did not start within {START_SECONDS:g} s")
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return self._line(self._seconds)

    def _line(self, seconds: float) -> dict[str, Any] | None:
        """The next answer, or None after killing a process that gave none in time."""
        assert self._process is not None
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout=seconds):
                self.close()
                return None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise VerifierError(f"the verifier {self._command[2]} ended by itself; run it by hand to see why")
        return json.loads(line)
