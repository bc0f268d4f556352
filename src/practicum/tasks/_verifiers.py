"""Ways of checking an answer, by the name a recipe uses; each takes the reply and the expected answer."""

import importlib.util
import logging
import re
from collections.abc import Callable
from decimal import Decimal

from practicum.errors import DataError
from practicum.tasks._deadline import Canary, VerifierProcess, Walls

log = logging.getLogger(__name__)

# A sign counts where it does not follow a word or a number: "5-3" ends with 3 and "x = -3" with -3.
_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+\u2212])?(?<![\w.])"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
)
_MATH_MODULE = "practicum.tasks._math"
_MATH_CANARY = Canary({"reply": r"The answer is $\frac{1}{2}$.", "answer": "0.5"}, 1.0)
_MATH = VerifierProcess(_MATH_MODULE, canary=_MATH_CANARY)


def exact(reply: str, answer: str) -> float:
    """1 where the reply is the answer, but for spaces around it."""
    return float(reply.strip() == answer.strip())


def contains(reply: str, answer: str) -> float:
    """1 where the answer stands in the reply, in any case, and not as a part of a longer word or number."""
    wanted = answer.strip()
    before = r"(?<!\w)" if wanted[:1].isalnum() else ""
    after = r"(?!\w)" if wanted[-1:].isalnum() else ""
    return float(re.search(before + re.escape(wanted) + after, reply, re.IGNORECASE) is not None)


def number(reply: str, answer: str) -> float:
    """1 where the last number of the reply equals the answer's: `8 * 7 = 56.` answers 56."""
    wanted = last_number(answer)
    return float(wanted is not None and last_number(reply) == wanted)


def math(reply: str, answer: str) -> float:
    """1 where math-verify finds the reply's result equal to the answer (LaTeX, fractions, sets); in its own process."""
    return _MATH.call({"reply": reply, "answer": answer})


def last_number(text: str) -> Decimal | None:
    """The last number of a text, exactly: `1,000.50` is one number, and so is `-3`."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").replace("\u2212", "-")) if found else None


def prepare(verifier: str, sandbox: Walls) -> Callable[[str, str], float]:
    """Return a verifier by its name; raise DataError where its package is missing, SandboxError where its walls are."""
    check_installed(verifier)
    if verifier != "math":
        return VERIFIERS[verifier]
    process = (
        _MATH
        if sandbox == "require"
        else VerifierProcess(_MATH_MODULE, canary=_MATH_CANARY, sandbox=sandbox)
    )
    remark = process.check_walls()
    if remark is not None:
        log.info(remark)
    return (
        math
        if process is _MATH
        else lambda reply, answer: process.call({"reply": reply, "answer": answer})
    )


def check_installed(verifier: str) -> None:
    """DataError where the verifier's package is missing."""
    if verifier == "math" and importlib.util.find_spec("math_verify") is None:
        raise DataError(
            "task.verifier: 'math' needs the package math-verify; run: pip install 'practicum[tasks]'"
        )


VERIFIERS: dict[str, Callable[[str, str], float]] = {
    "exact": exact,
    "contains": contains,
    "number": number,
    "math": math,
}
"""Every verifier by name."""

PACKAGES: dict[str, tuple[str, ...]] = {"math": ("math-verify",)}
"""The packages whose versions decide what a verifier finds right."""
