"""Verifiers by the name that a recipe uses: each compares a reply with the expected answer."""

import importlib.util
import logging
import re
from collections.abc import Callable
from decimal import Decimal

from practicum.errors import DataError
from practicum.tasks._deadline import Canary, VerifierProcess, Walls

log = logging.getLogger(__name__)

# A sign counts unless it follows a word or a number: "5-3" ends with 3 and "x = -3" with -3.
_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+\u2212])?(?<![\w.])"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
)
_MATH_MODULE = "practicum.tasks._math"
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
    """Return 1 if the last number of the reply equals the answer's: `8 * 7 = 56.` answers 56."""
    expected = find_last_number(answer)
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


def find_last_number(text: str) -> Decimal | None:
    """Return the last number of a text, exactly: `1,000.50` is one number, and so is `-3`."""
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "").replace("\u2212", "-")) if numbers else None


def prepare(verifier: str, sandbox: Walls) -> Callable[[str, str], float]:
    """Return a verifier by its name, and log a note on missing walls.

    Errors: DataError if its package is missing, SandboxError if a required wall is missing.
    """
    check_installed(verifier)
    if verifier != "math":
        return VERIFIERS[verifier]
    is_strict = sandbox == "require"
    process = (
        _MATH if is_strict else VerifierProcess(_MATH_MODULE, canary=_MATH_CANARY, sandbox=sandbox)
    )
    note = process.check_walls()
    if note is not None:
        log.info(note)
    if is_strict:
        return compare_mathematics
    return lambda reply, answer: process.call({"reply": reply, "answer": answer})


def check_installed(verifier: str) -> None:
    """Raise DataError if the verifier's package is missing."""
    if verifier == "math" and importlib.util.find_spec("math_verify") is None:
        raise DataError(
            "task.verifier: 'math' needs the package math-verify; run: "
            "pip install 'practicum[tasks]'"
        )


VERIFIERS: dict[str, Callable[[str, str], float]] = {
    "exact": compare_exactly,
    "contains": contains,
    "number": compare_numbers,
    "first_line": compare_first_line,
    "math": compare_mathematics,
}
"""Every verifier by name."""

PACKAGES: dict[str, tuple[str, ...]] = {"math": ("math-verify",)}
"""The packages whose versions decide the verdicts of a verifier."""
