"""The other end of `VerifierProcess`: reads requests from standard input and answers each with one line."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

LONGEST_REASON = 1000
"""Characters of what a verifier says on failing."""


class VerifierUnavailable(Exception):
    """Why this process cannot serve, whatever the request."""


def serve(answer: Callable[[dict[str, Any]], Any]) -> None:
    """Announce readiness, then answer until the input ends; nothing a verifier prints can reach the answers."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        print(_answered(answer, message["id"], message["request"]), file=answers, flush=True)


def _answered(
    answer: Callable[[dict[str, Any]], Any], request_id: str, request: dict[str, Any]
) -> str:
    try:
        return json.dumps({"id": request_id, "value": answer(request)})
    except VerifierUnavailable as reason:
        return json.dumps({"id": request_id, "refused": str(reason)})
    except Exception as error:
        # The edge of the process: whatever a foreign verifier raises travels on as text.
        return json.dumps(
            {"id": request_id, "failed": f"{type(error).__name__}: {error}"[:LONGEST_REASON]}
        )
