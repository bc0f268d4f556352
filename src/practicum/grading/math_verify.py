"""math-verify in a separate process: `python -m practicum.grading.math_verify`."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from practicum.grading.golds import (
    find_first_number,
    is_marked,
    is_sentence,
    list_boxes,
    mark,
    take_final,
    write_latex,
    write_scientific,
)
from practicum.grading.grammars import read_arithmetic
from practicum.sandbox.worker import serve

DECIMALS = 6
"""The decimals to which the package compares numbers, unless the expected number is tiny."""
DIGITS = 15
"""The digits to which it compares expressions."""


@dataclass(frozen=True)
class Mathematics:
    """The package: `parse` reads the mathematics of a text, `verify` compares two readings."""

    parse: Callable[..., list[Any]]
    verify: Callable[..., bool]

    def read(self, text: str) -> list[Any]:
        """Return all readings of a text; `1e-3` is a number, and may be e - 3 as well."""
        if is_marked(text):
            text = write_latex(text)
        scientific = write_scientific(text)
        texts = [text] if scientific == text else [text, scientific]
        return [reading for text in texts for reading in self.parse(text, parsing_timeout=0)]

    def read_gold(self, answer: str) -> list[Any]:
        """Return the readings of an expected answer; ValueError if it has none."""
        gold = self.read(mark(take_final(answer)))
        if not gold:
            raise ValueError(f"the answer {answer!r} is not mathematics")
        return gold

    def is_equal(self, gold: list[Any], reply: list[Any]) -> bool:
        """Return True if a reading of the reply equals one of the expected answer."""
        extra = _count_zeros(gold)
        return self.verify(
            gold,
            reply,
            float_rounding=DECIMALS + extra,
            numeric_precision=DIGITS + extra,
            timeout_seconds=0,
        )

    def find_problem(self, answer: str) -> str | None:
        """Return why no reply, or a wrong one, would score 1 for an expected answer, or None."""
        final = take_final(answer)
        if is_sentence(final):
            return "is text around the final answer"
        gold = self.read_gold(answer)
        if not any(self.is_equal(gold, self.read(box)) for box in list_boxes(final)):
            return "scores 0 for itself in \\boxed{}"
        number = find_first_number(final)
        plain = self.parse(mark(final), parsing_timeout=0)
        if number is not None and gold != plain:
            reply = self.read(f"\\boxed{{{number}}}")
            if self.is_equal(gold, reply) and not self.is_equal(plain, reply):
                return f"gives a score of 1 to its first number, {number}"
        return None


def _count_zeros(gold: list[Any]) -> int:
    """Return the zeros between the point and the first digit of a tiny number, else 0.

    Otherwise 1.6e-19 and 2e-19 would be equal.
    """
    from sympy import Expr

    for reading in gold:
        if isinstance(reading, Expr) and reading.is_real and reading.is_number:
            size = abs(float(reading))
            if 0 < size < 10.0**-3:
                return -math.floor(math.log10(size))
    return 0


def open_mathematics() -> Mathematics:
    """Import the package, and let it evaluate nothing but sentences of arithmetic."""
    # The package warns that its own timeouts are off; the deadline of this process replaces them.
    logging.disable(logging.WARNING)
    from math_verify import parse, parser, verify

    evaluate = parser.parse_expr

    def evaluate_arithmetic(text: str, **settings: Any) -> Any:
        sentence = read_arithmetic(text)
        if sentence is None:
            raise ValueError("not arithmetic")
        return evaluate(sentence, **settings)

    # If a reply has no LaTeX, the package evaluates the numbers, signs and brackets in it as
    # Python. Its own pattern selects these characters; the grammar also guards against a later
    # version with a more permissive pattern.
    parser.parse_expr = evaluate_arithmetic
    return Mathematics(parse, verify)


def run() -> None:
    """Serve scores of replies and problems of expected answers."""
    mathematics = open_mathematics()

    def respond(request: dict[str, Any]) -> float | str | None:
        answer = request["answer"]
        if "reply" not in request:
            return mathematics.find_problem(answer)
        gold = mathematics.read_gold(answer)
        return float(mathematics.is_equal(gold, mathematics.read(request["reply"])))

    serve(respond)


if __name__ == "__main__":
    run()
