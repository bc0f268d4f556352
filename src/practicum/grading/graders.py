"""From the verifier of a recipe to a function that grades a reply: a name, or the user's own.

A verifier of the user's has one form, `def verify(reply: str, prompt: Prompt) -> float`. Named as
`package.module:function` it runs in a process with a deadline; a callable of Python runs here.
"""

import contextvars
import dataclasses
import functools
import logging
import math
import sys
import threading
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, PlainSerializer
from pydantic.json_schema import SkipJsonSchema

from practicum.core.calls import suggest_name
from practicum.errors import DataError
from practicum.foreign import explain_missing, is_external, name_object
from practicum.grading import program_tests
from practicum.grading.user_function import (
    Function,
    compute_score,
    describe_failure,
    find_signature_problem,
)
from practicum.grading.verifiers import VERIFIERS, prepare
from practicum.ports.gate import Kind, reject
from practicum.prompts import Prompt
from practicum.sandbox.deadline import (
    SECONDS,
    Canary,
    OwnWalls,
    VerifierProcess,
    find_score_problem,
    score_failure,
)
from practicum.text.safe import excerpt

log = logging.getLogger(__name__)

Grader = Callable[[str, Prompt], float | None]
"""The reward of a reply to a prompt, or None if the prompt has no answer to compare with."""

_MODULE = "practicum.grading.user_function"

FUNCTIONS = {"tests": program_tests.FUNCTION}
"""Verifiers by name that read more of a row than its answer; they run like a user's function."""


def _read_verifier(raw: Any) -> Any:
    """Return a verifier unchanged; raise ValueError unless it is a known name or a function."""
    if callable(raw):
        problem = find_signature_problem(raw)
        if problem is not None:
            raise ValueError(f"{name_object(raw)!r} {problem}")
        return raw
    # A name with "<" belongs to a local function or a lambda of an earlier Python run: it is not a
    # misspelt name, and is refused only when it is needed.
    if isinstance(raw, str) and (raw in (*VERIFIERS, *FUNCTIONS) or is_external(raw) or "<" in raw):
        return raw
    raise ValueError(
        f"no verifier named {raw!r}; {suggest_name(str(raw), [*VERIFIERS, *FUNCTIONS])}; for a function of yours "
        "write package.module:function"
    )


def find_missing_module(verifier: str | Callable[..., Any]) -> str:
    """Return why a function of the user's cannot be imported; empty if its module is there."""
    is_named = isinstance(verifier, str) and verifier not in VERIFIERS and is_external(verifier)
    problem = explain_missing(str(verifier)) if is_named else ""
    return f"task.verifier: {problem}" if problem else ""


def _check_range(scores: tuple[float, float]) -> tuple[float, float]:
    """Return the range; raise ValueError if it is empty or not finite."""
    low, high = scores
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"write two numbers, the lower one first, as [-1, 1], not {list(scores)}")
    return scores


Verifier = Annotated[
    Literal["exact", "contains", "number", "first_line", "math", "tests"]
    | str
    | SkipJsonSchema[Callable[..., Any]],
    BeforeValidator(_read_verifier),
    PlainSerializer(name_object, return_type=str),
]
"""The setting `verifier` of a task: a name, `package.module:function`, or a function."""

RewardRange = Annotated[tuple[float, float], AfterValidator(_check_range)]
"""The least and the largest number that a verifier of the user's may return."""


def open_grader(
    verifier: str | Callable[..., Any], sandbox: OwnWalls, scores: tuple[float, float]
) -> Grader:
    """Return the function that grades replies, after everything that it needs was found.

    Errors: DataError if a function cannot be imported, or a setting or package does not fit;
    SandboxError if a required wall is missing.
    """
    if callable(verifier):
        return _CallableVerifier(verifier, scores).grade
    if verifier in FUNCTIONS:
        return _open_function(FUNCTIONS[verifier], sandbox, scores, name=verifier)
    if verifier in VERIFIERS:
        return _open_named(verifier, sandbox, scores)
    if is_external(verifier) and not verifier.startswith("__main__"):
        return _open_function(verifier, sandbox, scores, name=verifier)
    raise DataError(
        f"task.verifier: {verifier!r} was a function of a script or notebook, which another "
        "process cannot import; continue from that script with the same function, or move the "
        "function into a module and set package.module:function"
    )


def _open_named(verifier: str, sandbox: OwnWalls, scores: tuple[float, float]) -> Grader:
    """Return one of practicum's verifiers, which compares with the prompt's answer."""
    if sandbox == "off":
        raise DataError(
            f"task.sandbox: off is for a function of yours, and {verifier!r} is practicum's; "
            "write best_effort"
        )
    if scores != (0.0, 1.0):
        raise DataError(
            f"task.reward_range is for a function of yours; {verifier!r} gives 0 or 1; leave it out"
        )
    verify = prepare(verifier, sandbox)

    def grade(reply: str, prompt: Prompt) -> float | None:
        return None if prompt.answer is None else verify(reply, prompt.answer)

    return grade


def _open_function(
    function: str, sandbox: OwnWalls, scores: tuple[float, float], *, name: str
) -> Grader:
    """Return a function of the user's, called in a separate process with a deadline.

    Errors and rejections call it by its `name` in the recipe.
    """
    problem = find_missing_module(function)
    if problem:
        raise DataError(problem)
    failures = _Failures(name, scores)
    process = VerifierProcess(
        _MODULE,
        function,
        sandbox,
        canary=Canary({}, 1.0),
        sandbox=sandbox,
        scores=scores,
        # Not only PYTHONPATH: a notebook, for example, imports from its working folder.
        path=[entry or "." for entry in sys.path],
        imports=(function.partition(":")[0],),
        name=name,
        forks=True,
    )
    note = process.check_walls()
    if note is not None:
        log.info(note)
    try:
        process.start()
    except DataError as error:
        raise DataError(f"task.verifier: {error}") from None

    def grade(reply: str, prompt: Prompt) -> float:
        fields = dataclasses.asdict(dataclasses.replace(prompt, privileged=dict(prompt.privileged)))
        request = {"reply": reply, "prompt": fields}
        return process.call(request, functools.partial(failures.report, prompt))

    return grade


class _Failures:
    """Counts the completions that a verifier failed on; warns of the first, tenth, hundredth."""

    def __init__(self, name: str, scores: tuple[float, float]) -> None:
        self._name = name
        self._score = score_failure(scores)
        self._count = 0

    def report(self, prompt: Prompt, reason: str) -> None:
        """Count a failure, and warn if the count is a power of ten."""
        self._count += 1
        if self._count == 10 ** (len(str(self._count)) - 1):
            completions = "a completion" if self._count == 1 else f"{self._count} completions"
            log.warning(
                f"the verifier {self._name} failed on {completions}, which scored "
                f"{self._score:g}; prompt {excerpt(prompt.id)}: {excerpt(reason)}"
            )


class _CallableVerifier:
    """A function of this process. It cannot be stopped; after the deadline a warning says so."""

    def __init__(self, function: Function, scores: tuple[float, float]) -> None:
        self._function = function
        self._scores = scores
        self._name = name_object(function)
        self._failures = _Failures(self._name, scores)
        log.info(
            f"the verifier {self._name} is a function of this process: it runs here, without a "
            "sandbox, and is not stopped if it hangs"
        )

    def grade(self, reply: str, prompt: Prompt) -> float:
        """Return the function's number, or the score of a failure."""
        text = (
            f"the verifier {self._name} takes more than {SECONDS:g} s for prompt "
            f"{excerpt(prompt.id)}; a function of this process cannot be stopped, one that is "
            "named package.module:function can"
        )
        # A new thread begins without the listeners of this one, who show the warning.
        context = contextvars.copy_context()
        watchdog = threading.Timer(SECONDS, functools.partial(context.run, log.warning, text))
        watchdog.daemon = True
        watchdog.start()
        kind: Kind = "number"
        try:
            score = compute_score(self._function, reply, prompt)
            problem = find_score_problem(score, self._scores)
        except (Exception, SystemExit) as error:
            # The user's function may raise anything, and one odd reply must not end the run.
            problem, score, kind = describe_failure(self._function, error), 0.0, "error"
        finally:
            watchdog.cancel()
        if problem is None:
            return score
        reject(kind, f"the verifier {self._name}: {problem}")
        self._failures.report(prompt, problem)
        return score_failure(self._scores)
