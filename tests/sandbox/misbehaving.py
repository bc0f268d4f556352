"""A verifier that follows its request: run as `python -m misbehaving`."""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from typing import Any

from practicum.sandbox.worker import VerifierUnavailable, serve


def answer(request: dict[str, Any]) -> Any:
    match request["do"]:
        case "score":
            return request["score"]
        case "hang":
            while True:
                time.sleep(0.01)
        case "hang in C":
            return len(str(7 ** (7 ** request["size"])))
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(0)
        case "sleep":
            time.sleep(0.1)
            return 0.0
        case "write":
            _write("\n".join(request["lines"]).replace("ID", json.dumps(_request_id())) + "\n")
            time.sleep(60)
        case "drip":
            while True:
                _write("x")
                time.sleep(0.05)
        case "flood":
            for _ in range(request["bytes"] >> 20):
                _write("x" * (1 << 20))
            time.sleep(60)
        case "write later":
            threading.Timer(0.2, _write, ['{"value": 1.0}\n']).start()
            return request["score"]
        case "end later":
            threading.Timer(0.2, os._exit, (0,)).start()
            return request["score"]
        case "leave a child":
            if os.fork() == 0:
                os.setsid()
                time.sleep(60)
            return 1.0
        case "fail":
            raise ZeroDivisionError("by zero")
        case "memory":
            return len(bytearray(1 << 33))
        case "refuse":
            raise VerifierUnavailable("not today; try again tomorrow")
        case "print":
            print("noise")
            os.write(1, b"noise\n")
            return 1.0
        case "tell":
            return {
                "pid": os.getpid(),
                "environment": dict(os.environ),
                "path": sys.path[0],
                "group": os.getpgid(0),
            }
    return None


def _write(text: str) -> None:
    """Write to every open descriptor."""
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            rest = text.encode(errors="surrogateescape")
            while rest:
                rest = rest[os.write(descriptor, rest) :]


def _request_id() -> str:
    """Walk up to the frame that holds the id of the request."""
    frame = sys._getframe()
    while "request_id" not in frame.f_locals:
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_locals["request_id"]


if __name__ == "__main__":
    if "broken" in sys.argv:
        raise SystemExit(1)
    serve(answer)
