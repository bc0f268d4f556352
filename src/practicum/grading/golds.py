"""The text of an expected answer: its final part, its one number, and its form in a box.

This module only handles text, because the process of the verifier `math` imports it.
"""

import re
import unicodedata
from collections import deque
from decimal import Decimal

# A sign counts unless it follows a word or a number: "5-3" ends with 3 and "x = -3" with -3. The
# group is atomic, so that a longer number is never read as its first digits.
_DIGITS = (
    r"(?>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
)
_NUMBER = re.compile(rf"(?:(?<![\w.)])[-+\u2212])?(?<![\w.]){_DIGITS}")
_GOLD_NUMBER = re.compile(
    rf"(?:\\?[$\u20ac\u00a3\u00a5] ?)?(?P<number>{_NUMBER.pattern}) ?(?:\\?%)?\.?"
)
# Digits after one of these belong to an expression: 2^{10}, 2**10, \frac{1}{2}, \sqrt2, 3/4, 12:30.
_EXPRESSION_BEFORE = re.compile(
    r"(?:\^\{?|[\w)]\*\*|\}\{|\\(?:sqrt|[dt]?frac)\{?|[0-9)}]/|[0-9]:)[-+]?\Z"
)
# So do digits before one of these: 7½, 10², 2^n, 3/(x+1). An angle, 60^\circ, is a number.
_EXPRESSION_AFTER = re.compile(
    r"[\u00bc-\u00be\u2150-\u215e\u2189\u00b2\u00b3\u00b9\u2070-\u209f]"
    r"|\^(?!\{?\\circ)|\*\*[\w(]|/[0-9(\\]|:[0-9]"
)
_MARKED = re.compile(r"\\boxed|(?<!\\)\$.+(?<!\\)\$|(?<!\\)\\\(.+\\\)|(?<!\\)\\\[.+\\\]", re.DOTALL)
_MARKS = re.compile(r"(?<!\\)(?:\$+|\\[()\[\]])")
_SCIENTIFIC = re.compile(r"(?<![\w.\\])([0-9]+(?:\.[0-9]+)?)e([-+]?[0-9]+)(?!\w|\.[0-9])")
_NAMED = re.compile(r"\\(?:text\w*|mathrm|mathbf|operatorname|mbox|begin|end)\*? ?\{[^}]*\}")
_WORD = re.compile(r"(?<![\\\w])[A-Za-z]{3,}(?!\w)")

# The 2 of 5 m² belongs to a unit, which math-verify leaves out.
_RAISED = re.compile(
    "([0-9)}\\]]|(?<![A-Za-z])(?<![0-9] )[A-Za-z\u03c0])([\u2070\u00b9\u00b2\u00b3\u2074-\u207b]+)"
)
_FRACTION = re.compile("[\u00bc-\u00be\u2150-\u215e]|[0-9]+\u2044[0-9]+")
_MIXED = re.compile(r"(?<![\w.,/^])([0-9]+) ([0-9]+)/([0-9]+)(?![\w/])")
_ROOT = re.compile("\u221a ?(?:\\(([^()]*)\\)|([0-9.]+|[A-Za-z]))")
_SIGNS = str.maketrans(
    {
        "\u221e": "\\infty ",
        "\u00b7": "\\cdot ",
        "\u222a": "\\cup ",
        "\u2229": "\\cap ",
        "\u2212": "-",
    }
)

MOST_WORDS = 3
"""The most words in an expression; an answer with more is a sentence."""


def take_final(answer: str) -> str:
    """Return the final answer: what follows the last `####`, or the boxed text without one."""
    return answer.rpartition("####")[2].strip()


def is_marked(final: str) -> bool:
    """Return True if the text says where its mathematics is: in `$`, `\\(`, `\\[` or a box."""
    return _MARKED.search(final) is not None


def mark(final: str) -> str:
    """Return a final answer as text with marked mathematics; a text without marks is one expression."""
    return final if is_marked(final) else f"${' '.join(final.split())}$"


def list_boxes(final: str) -> list[str]:
    """Return the replies that state a final answer in a box."""
    if "\\boxed" in final:
        return [final]
    boxed = f"\\boxed{{{_MARKS.sub('', final)}}}"
    around, parts = _MARKS.split(final)[::2], _MARKS.split(final)[1::2]
    if not parts or find_first_number(" ".join(around)):
        return [boxed]
    return [boxed, f"\\boxed{{{', '.join(parts)}}}"]


def write_scientific(text: str) -> str:
    """Return the text with `4.5e33` as `4.5E33`, which math-verify reads as one number.

    A number in a text without marked mathematics is marked.
    """
    return _SCIENTIFIC.sub(r"\1E\2" if is_marked(text) else r"$\1E\2$", text)


def write_latex(text: str) -> str:
    """Return the text with signs of Unicode and mixed numbers as LaTeX.

    math-verify reads `2√3`, `2½`, `1 1/2`, `10²` and `(-∞, 3]` up to the sign, as their first number.
    """
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = _RAISED.sub(lambda raised: f"{raised[1]}^{{{_spell(raised[2])}}}", text)
    text = _FRACTION.sub(
        lambda signs: "\\frac{" + _spell(signs[0]).replace("\u2044", "}{") + "}", text
    )
    return _ROOT.sub(r"\\sqrt{\1\2}", text).translate(_SIGNS)


def _spell(signs: str) -> str:
    return unicodedata.normalize("NFKC", signs)


def is_sentence(final: str) -> bool:
    """Return True for a text without marks that has more words or lines than an expression."""
    if is_marked(final):
        return False
    is_long = "\n" in final and "\\begin" not in final
    return is_long or len(_WORD.findall(_NAMED.sub("", final))) > MOST_WORDS


def find_last_number(text: str) -> Decimal | None:
    """Return the last number of a text, exactly: `1,000.50` is one number, and so is `-3`.

    None without one, and where the last number is only a part of an expression, as in `2^{10}`,
    `3/4` or `12:30`.
    """
    last = next(iter(deque(_NUMBER.finditer(text), maxlen=1)), None)
    if last is None or _EXPRESSION_AFTER.match(text, last.end()):
        return None
    before = text[max(last.start() - 20, 0) : last.start()]
    return None if _EXPRESSION_BEFORE.search(before) else _read_decimal(last.group())


def read_number(answer: str) -> Decimal | None:
    """Return the number that an expected answer is; None if its final part is not one number."""
    match = _GOLD_NUMBER.fullmatch(take_final(answer).strip("$ "))
    return None if match is None else _read_decimal(match["number"])


def find_first_number(text: str) -> str | None:
    """Return the first number in a text in its written form, or None."""
    match = _NUMBER.search(text)
    return None if match is None else match.group()


def _read_decimal(number: str) -> Decimal:
    return Decimal(number.replace(",", "").replace("\u2212", "-"))
