"""The other end of `VerifierProcess`: reads requests from standard input, answers a line each."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

LONGEST_REASON = 1000
"""The most characters of a verifier's reason for failing."""


class VerifierUnavailable(Exception):
    """The reason why this process cannot serve any request."""


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def serve(
    respond: Callable[[dict[str, Any]], Any], describe: Callable[[Exception], str] = _describe
) -> None:
    """Announce readiness, then answer requests until the input ends.

    `describe` returns the line for an exception of `respond`.
    """
    # The answers get a descriptor of their own, and standard output becomes standard error, so that
    # nothing a verifier prints can pass for an answer.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        answer = _respond(respond, describe, message["id"], message["request"])
        print(answer, file=answers, flush=True)


def _respond(
    respond: Callable[[dict[str, Any]], Any],
    describe: Callable[[Exception], str],
    request_id: str,
    request: dict[str, Any],
) -> str:
    try:
        return json.dumps({"id": request_id, "value": respond(request)})
    except VerifierUnavailable as reason:
        return json.dumps({"id": request_id, "refused": str(reason)})
    except Exception as error:
        # A foreign verifier may raise anything; its error must not end this process.
        return json.dumps({"id": request_id, "failed": describe(error)[:LONGEST_REASON]})
