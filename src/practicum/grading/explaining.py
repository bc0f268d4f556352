"""The words of practicum's verifiers about an answer: what is wrong, and not what would be right."""

from collections.abc import Callable, Mapping

from practicum.grading.golds import find_last_number, read_number
from practicum.grading.verifiers import compare_exactly, compare_numbers, contains, read_first_line

Explanation = Callable[[str, str], str]
"""A function of a reply and of the right answer."""

RIGHT = "The answer is right."


def explain_text(reply: str, answer: str) -> str:
    """Say whether a reply is the answer."""
    if compare_exactly(reply, answer):
        return RIGHT
    return "The answer is not right." if reply.strip() else "There is no answer."


def explain_contents(reply: str, answer: str) -> str:
    """Say whether a reply contains the answer."""
    if contains(reply, answer):
        return RIGHT
    return "The answer does not contain what was asked for."


def explain_number(reply: str, answer: str) -> str:
    """Say on which side of the right number the last one of a reply lies."""
    if compare_numbers(reply, answer):
        return RIGHT
    number, expected = find_last_number(reply), read_number(answer)
    if number is None or expected is None:
        return "There is no number in the answer."
    return f"The last number of the answer, {number}, is too {'small' if number < expected else 'large'}."


def explain_first_line(reply: str, answer: str) -> str:
    """Say on which side of the right number the last one of the reply's first line lies."""
    return explain_number(read_first_line(reply), answer)


EXPLANATIONS: Mapping[str, Explanation] = {
    "exact": explain_text,
    "contains": explain_contents,
    "number": explain_number,
    "first_line": explain_first_line,
}
"""The explanations by the names of their verifiers; `math` has none."""
