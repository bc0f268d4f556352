"""Loops in an answer: in its characters, and token by token."""

import zlib
from collections import Counter
from collections.abc import Sequence

LONG_TEXT, RATIO = 10_000, 10.0
"""An answer is degenerate when its last 10,000 characters compress more than tenfold (Stable-OPD, arXiv 2604.08527)."""

LONGEST_PERIOD = 8
"""Loops of up to so many tokens are looked for."""

FEWEST_ROUNDS = 3
"""Fewer rounds than this are no loop whose tokens count as repeated."""


def is_degenerate(text: str) -> bool:
    """Whether a long answer ends in a loop, by the definition of arXiv 2604.08527; False for shorter answers."""
    if len(text) <= LONG_TEXT:
        return False
    tail = text[-LONG_TEXT:].encode()
    return len(tail) / len(zlib.compress(tail)) > RATIO


def longest_run(tokens: Sequence[int]) -> int:
    """Tokens in the longest stretch that repeats one n-gram of up to 8 tokens, at least twice; 0 where there is none."""
    return max((end - start for start, end, _ in _runs(tokens)), default=0)


def repeated_tokens(tokens: Sequence[int]) -> list[bool]:
    """For each token whether it only says again what the n-gram before it said.

    The first round of a loop is not counted, and neither are loops of fewer than three rounds.
    """
    said = [False] * len(tokens)
    for start, end, period in _runs(tokens):
        if end - start >= FEWEST_ROUNDS * period:
            said[start + period : end] = [True] * (end - start - period)
    return said


def repeated_share(tokens: Sequence[int], n: int = 3) -> float:
    """The share of n-grams that stand in the answer more than once; 0 where it is shorter than n."""
    grams = Counter(tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1))
    total = sum(grams.values())
    return sum(count for count in grams.values() if count > 1) / total if total else 0.0


def _runs(tokens: Sequence[int]) -> list[tuple[int, int, int]]:
    """Stretches that repeat with a period of up to 8, as (start, end, period), at least two rounds long."""
    found = []
    for period in range(1, LONGEST_PERIOD + 1):
        start = 0
        for place in range(period, len(tokens) + 1):
            if place < len(tokens) and tokens[place] == tokens[place - period]:
                continue
            if place - start >= 2 * period:
                found.append((start, place, period))
            start = place - period + 1
    return found
