"""Loops in an answer: in its characters, and token by token."""

import zlib
from collections import Counter
from collections.abc import Sequence

LONG_TEXT, RATIO = 10_000, 10.0
"""The tail of an answer that is compressed, in characters, and the ratio above which it loops.

Source: Stable-OPD, arXiv 2604.08527.
"""

LONGEST_PERIOD = 8
"""The longest loop that is searched for, in tokens."""

FEWEST_ROUNDS = 3
"""The fewest rounds of a loop for its tokens to count as repeated."""


LOOPED_TAIL, SHORTEST_LOOPED = 1_000, 8
"""The tail of an answer that `is_looping` reads, and the shortest answer it judges, in characters."""


def is_looping(text: str) -> bool:
    """Return True if over half of an answer's tail repeats the text before it.

    The repeated parts are up to 8 characters or 8 words long. An answer shorter than 8 characters
    is never a loop: a number such as 111 is not a loop.
    """
    tail = text[-LOOPED_TAIL:]
    if len(tail) < SHORTEST_LOOPED:
        return False
    return any(
        2 * sum(repeated_tokens(numbers)) > len(numbers)
        for numbers in map(_number_parts, (tail, tail.split()))
    )


def is_degenerate(text: str) -> bool:
    """Return True if a long answer ends in a loop (arXiv 2604.08527); False if it is shorter."""
    if len(text) <= LONG_TEXT:
        return False
    tail = text[-LONG_TEXT:].encode()
    return len(tail) / len(zlib.compress(tail)) > RATIO


def longest_run(tokens: Sequence[int]) -> int:
    """Return the length of the longest loop of an n-gram of at most 8 tokens; 0 without a loop."""
    return max((end - start for start, end, _ in _runs(tokens)), default=0)


def repeated_tokens(tokens: Sequence[int]) -> list[bool]:
    """Return a mask of the tokens that repeat the n-gram before them, as long as `tokens`.

    The first round of a loop is not counted, nor are loops of fewer than three rounds.
    """
    mask = [False] * len(tokens)
    for start, end, period in _runs(tokens):
        if end - start >= FEWEST_ROUNDS * period:
            mask[start + period : end] = [True] * (end - start - period)
    return mask


def repeated_share(tokens: Sequence[int], n: int = 3) -> float:
    """Return the share of n-grams that occur more than once; 0 if the answer is shorter than n."""
    grams = Counter(tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1))
    total = sum(grams.values())
    return sum(count for count in grams.values() if count > 1) / total if total else 0.0


def _number_parts(parts: Sequence[str]) -> list[int]:
    """Return a number for each part, the same for equal parts."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(part, len(numbers)) for part in parts]


def _runs(tokens: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the loops with a period of at most 8 and two rounds or more: (start, end, period)."""
    runs = []
    for period in range(1, LONGEST_PERIOD + 1):
        start = 0
        for index in range(period, len(tokens) + 1):
            if index < len(tokens) and tokens[index] == tokens[index - period]:
                continue
            if index - start >= 2 * period:
                runs.append((start, index, period))
            # The next run of this period cannot hold both tokens of the mismatch: it begins after
            # the first of them at the earliest.
            start = index - period + 1
    return runs
