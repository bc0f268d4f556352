"""The other end of `VerifierProcess`: reads requests from standard input, answers a line each."""

import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from practicum.sandbox.isolation import isolate_child

LONGEST_ANSWER = 4 << 10
"""Bytes of an answer that a child may write."""

PROCESSOR_SECONDS = 10
"""The processor time of a child; the run ends it sooner by the clock, if it has a single thread."""

LONGEST_REASON = 1000
"""The most characters of a verifier's reason for failing."""


class VerifierUnavailable(Exception):
    """The reason why this process cannot serve any request."""


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def serve(
    respond: Callable[[dict[str, Any]], Any],
    describe: Callable[[Exception], str] = _describe,
    prepare: Callable[[], object] = lambda: None,
) -> None:
    """Announce readiness, then answer requests until the input ends.

    `describe` returns the line for an exception of `respond`. `prepare` loads what the first
    request would load, before the clock of that request runs.
    """
    # The answers get a separate descriptor, and standard output becomes standard error, so that
    # nothing that a verifier prints can pass for an answer.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # The first request raises the same error and reports it.
    with contextlib.suppress(Exception):
        prepare()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        answer = _respond(respond, describe, message["id"], message["request"])
        print(answer, file=answers, flush=True)


def serve_apart(
    respond: Callable[[dict[str, Any]], Any],
    describe: Callable[[Exception], str] = _describe,
    prepare: Callable[[], object] = lambda: None,
    *,
    sandbox: str = "require",
) -> None:
    """Announce readiness, then answer each request in a child that ends with its answer.

    Each child is a copy of this process in its state before the first request: a reply that a function
    executes changes nothing for the next reply. A child has neither the requests nor the answers of
    the run, only a pipe to this process, which passes on one line and kills the child.
    """
    answers = os.dup(1)
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # Everything that the module imports is loaded once, before the first child.
    with contextlib.suppress(Exception):
        prepare()
    os.write(answers, json.dumps({"ready": True}).encode() + b"\n")
    for line in requests:
        message = json.loads(line)
        reading, writing = os.pipe()
        parent, child = os.getpid(), os.fork()
        if child == 0:
            for descriptor in (reading, requests.fileno(), answers):
                os.close(descriptor)
            _answer_apart(respond, describe, message, writing, parent, sandbox)
        os.close(writing)
        answer = _read_line(reading)
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        ended = {"id": message["id"], "failed": "its process ended by itself"}
        os.write(answers, answer or json.dumps(ended).encode() + b"\n")


def _answer_apart(
    respond: Callable[[dict[str, Any]], Any],
    describe: Callable[[Exception], str],
    message: dict[str, Any],
    writing: int,
    parent: int,
    sandbox: str,
) -> NoReturn:
    """Answer one request in a child, and end it."""
    try:
        if sandbox != "off":
            isolate_child(parent, required=sandbox == "require")
        resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_SECONDS, PROCESSOR_SECONDS))
        answer = _respond(respond, describe, message["id"], message["request"])
        os.write(writing, answer.encode()[:LONGEST_ANSWER] + b"\n")
    finally:
        os._exit(0)


def _read_line(pipe: int) -> bytes:
    """Return the line of a child with its end; empty if it wrote none, or too much."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(pipe, LONGEST_ANSWER)
        line += part
        if not part or len(line) > LONGEST_ANSWER or b"\n" in line[:-1]:
            return b""
    return line


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
