"""Compare the expected answer of each row with the recipe's verifier, before a run learns from it.

The right answer must score 1. The check takes milliseconds for an answer that is not a plain
number, and equal answers are checked once in a process.
"""

import logging
import re
import time
from collections.abc import Callable, Sequence
from functools import lru_cache

from practicum.grading.golds import read_number, take_final
from practicum.grading.verifiers import is_installed, open_math
from practicum.sandbox import NoLine
from practicum.sandbox.deadline import SECONDS, OwnWalls, VerifierFailed, Walls
from practicum.text.safe import excerpt

log = logging.getLogger(__name__)

PLAIN = re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,15})?")
"""Numbers that `math` certainly reads, so its process is not asked."""
UNIT = re.compile(
    r"(?P<number>-?[0-9]{1,15}(?:\.[0-9]{1,15})?) (?P<unit>[A-Za-z]{3,}(?: [A-Za-z]+)*|[A-Za-z]+/[A-Za-z]+)"
)
"""A number and a word, or two names with a slash: products in algebra have shorter names."""
REMEMBERED = 1 << 17
"""The number of cached checks of answers, enough for a large dataset."""
PROGRESS_SECONDS = 10.0
SHOWN = 60
"""The most characters of an answer in a message."""


class GoldChecker:
    """Checks the answers of one source's rows, and says every ten seconds how far it is."""

    def __init__(self, verifier: str, sandbox: OwnWalls, source: str) -> None:
        self._verifier = verifier
        self._sandbox = sandbox
        self._source = source
        self._count = 0
        self._spoke = time.monotonic()
        self._units: list[tuple[int, str, str, str]] = []

    def find_problem(self, answer: str) -> str | None:
        """Return why the verifier cannot judge by an answer and what to write, or None."""
        self._count += 1
        if self._verifier in ("number", "first_line"):
            return _find_number_problem(answer, self._verifier)
        if not self._asks_math() or PLAIN.fullmatch(take_final(answer)):
            return None
        problem = _find_math_problem(answer, self._walls)
        if time.monotonic() - self._spoke > PROGRESS_SECONDS:
            self._spoke = time.monotonic()
            log.info(f"{self._source}: {self._count} answers compared with the verifier so far")
        return problem

    def note_unit(self, answer: str, row: int) -> None:
        """Remember an answer with a unit that `math` reads as a product of letters."""
        match = UNIT.fullmatch(take_final(answer)) if self._asks_math() else None
        if match is not None and not _equals_number(answer, match["number"], self._walls):
            self._units.append((row, take_final(answer), match["number"], match["unit"]))

    def describe_units(self) -> str | None:
        """Return a note on the answers with a unit that `math` does not know, or None."""
        if not self._units:
            return None
        row, answer, number, unit = self._units[0]
        return (
            f"{len(self._units)} answers end in letters that math-verify does not know as a unit; the "
            f"first is {excerpt(answer, most=SHOWN)!r} in row {row}, for which a reply of {number} scores "
            f"0; if it is a unit, write {number} or {number}\\text{{ {excerpt(unit, most=SHOWN)}}}"
        )

    def _asks_math(self) -> bool:
        # `off` and a missing package are refused for the whole task.
        return self._verifier == "math" and self._sandbox != "off" and is_installed("math")

    @property
    def _walls(self) -> Walls:
        return "require" if self._sandbox == "require" else "best_effort"


def describe_exact(answers: Sequence[str]) -> str | None:
    """Return a note on answers that no short reply equals exactly, or None."""
    worked = sum("####" in answer for answer in answers)
    if worked:
        return (
            f"{_count(worked, answers)} hold ####, and the verifier 'exact' compares a reply with "
            "all of the text; set verifier: number or math for the final answer after ####"
        )
    lines = sum("\n" in answer.strip() for answer in answers)
    if lines:
        return (
            f"{_count(lines, answers)} span several lines, and the verifier 'exact' compares a "
            "reply with all of them; if only the final answer counts, write only it, or set "
            "verifier: contains"
        )
    return None


def describe_long(
    answers: Sequence[str], encode: Callable[[str], Sequence[int]], limit: int
) -> str | None:
    """Return a note on answers of more tokens than a reply may have, or None."""
    # A text never has more tokens than bytes.
    long = [answer for answer in answers if len(answer.encode()) > limit]
    count = sum(len(encode(answer)) > limit for answer in long)
    if not count:
        return None
    return (
        f"{_count(count, answers)} have more tokens than rollout.max_new_tokens, {limit}, and the "
        "verifier 'exact' compares a reply with all of them; raise it, or write another verifier"
    )


def _count(count: int, answers: Sequence[str]) -> str:
    return f"{count} of {len(answers)} answers"


def _find_number_problem(answer: str, verifier: str) -> str | None:
    if read_number(answer) is not None:
        return None
    return (
        f"answer {excerpt(answer, most=SHOWN)!r} is not one number, which the verifier {verifier!r} "
        "compares; write only the number, or write it after ####, or set verifier: math"
    )


@lru_cache(maxsize=REMEMBERED)
def _find_math_problem(answer: str, sandbox: Walls) -> str | None:
    try:
        problem = open_math(sandbox).ask({"answer": answer}, SECONDS)
    except VerifierFailed:
        problem = "is not mathematics"
    except NoLine:
        problem = f"takes math-verify more than {SECONDS:g} s"
    if problem is None:
        return None
    return (
        f"answer {excerpt(answer, most=SHOWN)!r} {problem}, so the verifier 'math' would judge wrongly; "
        "write only the final answer as LaTeX, or write it after ####, or set verifier: exact"
    )


@lru_cache(maxsize=REMEMBERED)
def _equals_number(answer: str, number: str, sandbox: Walls) -> bool:
    """Return True if a reply of only the number scores 1 for an answer with a unit."""
    try:
        request = {"answer": answer, "reply": f"\\boxed{{{number}}}"}
        return open_math(sandbox).ask(request, SECONDS) == 1.0
    except (VerifierFailed, NoLine):
        return False
