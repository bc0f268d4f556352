"""The other end of `Deadline`: reads requests from standard input and answers each with one line."""

import faulthandler
import json
import os
import resource
import sys
from collections.abc import Callable
from typing import Any

LARGEST_MEMORY = 4 << 30
"""Bytes of address space; what a model wrote may ask for any number."""


class Refused(Exception):
    """Why this process cannot serve, whatever the request."""


def serve(answer: Callable[[dict[str, Any]], Any]) -> None:
    """Announce readiness, then answer until the input ends; nothing a verifier prints can reach the answers."""
    resource.setrlimit(resource.RLIMIT_AS, (LARGEST_MEMORY, LARGEST_MEMORY))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        for line in sys.stdin:
            message = json.loads(line)
            # A watch in C that needs no lock of the interpreter: it ends a process whose parent is gone.
            faulthandler.dump_traceback_later(message["seconds"] + 1, exit=True, file=nowhere)
            print(json.dumps(_answered(answer, message["request"])), file=answers, flush=True)
            faulthandler.cancel_dump_traceback_later()


def _answered(answer: Callable[[dict[str, Any]], Any], request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"value": answer(request)}
    except Refused as reason:
        return {"refused": str(reason)}
    except Exception as error:
        # The edge of the process: whatever a foreign verifier raises travels on as text.
        return {"failed": f"{type(error).__name__}: {error}"}
