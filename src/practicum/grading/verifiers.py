"""Verifiers by the name that a recipe uses: each compares a reply with the expected answer."""

import importlib.util
import logging
import re
from collections.abc import Callable
from functools import cache

from practicum.errors import DataError, suggest_install
from practicum.grading.golds import find_last_number, read_number
from practicum.sandbox.deadline import Canary, VerifierProcess, Walls

log = logging.getLogger(__name__)

_MATH_MODULE = "practicum.grading.math_verify"
_MATH_CANARY = Canary({"reply": r"The answer is $\frac{1}{2}$.", "answer": "0.5"}, 1.0)
_MATH = VerifierProcess(_MATH_MODULE, canary=_MATH_CANARY)


def compare_exactly(reply: str, answer: str) -> float:
    """Return 1 if the reply is the answer, apart from spaces around it, else 0."""
    return float(reply.strip() == answer.strip())


def contains(reply: str, answer: str) -> float:
    """Return 1 if the reply contains the answer as whole words or numbers, in any case, else 0."""
    text = answer.strip()
    before = r"(?<!\w)" if text[:1].isalnum() else ""
    after = r"(?!\w)" if text[-1:].isalnum() else ""
    return float(re.search(before + re.escape(text) + after, reply, re.IGNORECASE) is not None)


def compare_numbers(reply: str, answer: str) -> float:
    """Return 1 if the last number of the reply is the answer's: `8 * 7 = 56.` answers 56."""
    expected = read_number(answer)
    return float(expected is not None and find_last_number(reply) == expected)


def compare_first_line(reply: str, answer: str) -> float:
    """Return the same of the reply's first line: a confidence on the next line is not the answer."""
    return compare_numbers(read_first_line(reply), answer)


def read_first_line(text: str) -> str:
    """Return the first line of a text that is not blank."""
    return text.strip().partition("\n")[0]


def compare_mathematics(reply: str, answer: str) -> float:
    """Return 1 if math-verify, in its own process, finds both equal (LaTeX, fractions, sets)."""
    return _MATH.call({"reply": reply, "answer": answer})


def prepare(verifier: str, sandbox: Walls) -> Callable[[str, str], float]:
    """Return a verifier by its name, and log a note on missing walls.

    Errors: DataError if its package is missing, SandboxError if a required wall is missing.
    """
    check_installed(verifier)
    if verifier != "math":
        return VERIFIERS[verifier]
    process = open_math(sandbox)
    note = process.check_walls()
    if note is not None:
        log.info(note)
    return lambda reply, answer: process.call({"reply": reply, "answer": answer})


def open_math(sandbox: Walls) -> VerifierProcess:
    """Return the process of math-verify, which all tasks of this process share."""
    return _MATH if sandbox == "require" else _open_lax_math()


@cache
def _open_lax_math() -> VerifierProcess:
    return VerifierProcess(_MATH_MODULE, canary=_MATH_CANARY, sandbox="best_effort")


def check_installed(verifier: str) -> None:
    """Raise DataError if the verifier's package is missing."""
    if not is_installed(verifier):
        raise DataError(
            f"task.verifier: 'math' needs the package math-verify; {suggest_install('tasks')}"
        )


def is_installed(verifier: str) -> bool:
    """Return True if the verifier's package is there, or if it needs none."""
    return verifier != "math" or importlib.util.find_spec("math_verify") is not None


VERIFIERS: dict[str, Callable[[str, str], float]] = {
    "exact": compare_exactly,
    "contains": contains,
    "number": compare_numbers,
    "first_line": compare_first_line,
    "math": compare_mathematics,
}
"""Every verifier by name."""

PACKAGES: dict[str, tuple[str, ...]] = {"math": ("math-verify",)}
"""The packages of each verifier; their versions affect its verdicts."""
