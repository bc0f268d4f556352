"""A verifier that does what its request says: run as `python -m misbehaving`."""

import os
import signal
import sys
import time
from typing import Any

from practicum.tasks._worker import Refused, serve


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
        case "fail":
            raise ZeroDivisionError("by zero")
        case "memory":
            return len(bytearray(1 << 33))
        case "refuse":
            raise Refused("not today; come back tomorrow")
        case "print":
            print("noise")
            os.write(1, b"noise\n")
            return 1.0
        case "tell":
            return {"pid": os.getpid(), "environment": dict(os.environ), "path": sys.path[0], "group": os.getpgid(0)}
    return None


if __name__ == "__main__":
    if "broken" in sys.argv:
        raise SystemExit(1)
    serve(answer)
