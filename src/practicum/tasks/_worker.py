"""The other end of `Deadline`: reads requests from standard input and answers each with one line."""

import json
import resource
import sys
from collections.abc import Callable
from typing import Any

LARGEST_MEMORY = 4 << 30
"""Bytes of address space; what a model wrote may ask for any number."""


def serve(score: Callable[[dict[str, Any]], float]) -> None:
    """Announce readiness, then answer until the input ends; nothing a verifier prints can reach the answers."""
    resource.setrlimit(resource.RLIMIT_AS, (LARGEST_MEMORY, LARGEST_MEMORY))
    answers = sys.stdout
    sys.stdout = sys.stderr
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps({"score": score(json.loads(line))}), file=answers, flush=True)


def refuse(reason: str) -> None:
    """Announce readiness and answer every request with the reason why there are no scores."""
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"error": reason}), flush=True)
