"""Loops, by the paper's definition and token by token."""

import random
import string
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.statistics import (
    is_degenerate,
    is_looping,
    longest_run,
    repeated_share,
    repeated_tokens,
)

TOKENS = st.lists(st.integers(0, 2), max_size=24)


def test_an_answer_is_degenerate_by_the_definition_of_the_paper() -> None:
    """Check answers longer than 10,000 characters with last 10,000 that compress more than tenfold (arXiv 2604.08527)."""
    noise = "".join(random.Random(0).choices(string.printable, k=20_000))
    loop = "so the answer is 4. " * 1_000
    assert is_degenerate(loop) and is_degenerate(noise + loop) and not is_degenerate(noise)
    assert not is_degenerate(loop[:10_000]), "not longer than 10,000 characters"
    assert is_degenerate(loop[:10_001])
    assert not is_degenerate(loop + noise), "only the end counts"
    for text in (loop, noise, noise + loop, loop + noise):
        tail = text[-10_000:].encode()
        assert is_degenerate(text) is (len(tail) / len(zlib.compress(tail)) > 10.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cccccccc", True),
        ("the capital of Peru is the capital of Peru is the capital of Peru is", True),
        ("12 and 12 and 12 and", True),
        ("1111", False),
        ("Lima is the capital of Peru.", False),
        ("", False),
    ],
)
def test_a_loop_repeats_over_half_of_a_short_answer(text: str, expected: bool) -> None:
    assert is_looping(text) is expected


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], 0),
        ([1], 0),
        ([1, 2, 3], 0),
        ([1, 1], 2),
        ([1, 2, 1, 2], 4),
        ([1, 2, 1, 2, 1], 5),
        ([9, 1, 2, 3, 1, 2, 3, 8], 6),
        ([1, 2, 1], 0),
        (list(range(8)) * 2, 16),
        (list(range(9)) * 2, 0),
    ],
)
def test_the_longest_run_of_a_repeated_ngram(tokens: list[int], expected: int) -> None:
    assert longest_run(tokens) == expected


@given(TOKENS)
def test_the_longest_run_is_that_of_brute_force(tokens: list[int]) -> None:
    best = 0
    for start in range(len(tokens)):
        for end in range(start + 2, len(tokens) + 1):
            span = tokens[start:end]
            periods = range(1, min(8, len(span) // 2) + 1)
            if any(all(span[i] == span[i - p] for i in range(p, len(span))) for p in periods):
                best = max(best, len(span))
    assert longest_run(tokens) == best


@given(TOKENS)
def test_a_repeated_token_says_what_stood_a_period_before(tokens: list[int]) -> None:
    said = repeated_tokens(tokens)
    assert len(said) == len(tokens) and not any(said[:1])
    for place, again in enumerate(said):
        assert not again or any(
            place >= p and tokens[place] == tokens[place - p] for p in range(1, 9)
        )


def test_two_rounds_are_no_loop_yet_and_the_first_never_counts() -> None:
    assert repeated_tokens([1, 2, 1, 2]) == [False] * 4
    assert repeated_tokens([1, 2, 1, 2, 1, 2, 3]) == [False, False, True, True, True, True, False]
    assert repeated_tokens([5, 5, 5]) == [False, True, True]


def test_the_share_of_repeated_ngrams() -> None:
    assert repeated_share([1, 2, 3, 1, 2, 3]) == pytest.approx(2 / 4)
    assert repeated_share([1, 2]) == 0.0
    assert repeated_share([7] * 10) == 1.0
