"""Ways of checking an answer, by the name a recipe uses; each takes the reply and the expected answer."""

import re
from collections.abc import Callable

from practicum.tasks._deadline import Deadline

_NUMBER = re.compile(r"[-\u2212]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
_MATH = Deadline("practicum.tasks._math")


def exact(reply: str, answer: str) -> float:
    """1 where the reply is the answer, but for spaces around it."""
    return float(reply.strip() == answer.strip())


def contains(reply: str, answer: str) -> float:
    """1 where the answer stands in the reply, in any case."""
    return float(answer.strip().casefold() in reply.casefold())


def number(reply: str, answer: str) -> float:
    """1 where the last number of the reply equals the answer's: `8 * 7 = 56.` answers 56."""
    found, wanted = _NUMBER.findall(reply), _NUMBER.findall(answer)
    return float(bool(found) and bool(wanted) and _value(found[-1]) == _value(wanted[-1]))


def math(reply: str, answer: str) -> float:
    """1 where math-verify finds the reply's result equal to the answer (LaTeX, fractions, sets); in its own process."""
    return _MATH.call({"reply": reply, "answer": answer})


def _value(text: str) -> float:
    return float(text.replace(",", "").replace("\u2212", "-"))


VERIFIERS: dict[str, Callable[[str, str], float]] = {
    "exact": exact,
    "contains": contains,
    "number": number,
    "math": math,
}
"""Every verifier by name."""
