"""Many answers to one prompt: how often one is right, how much they differ, and whether confidence is earned."""

import difflib
import math
from collections import Counter
from collections.abc import Sequence
from itertools import combinations, pairwise


def pass_at_k(count: int, right: int, k: int) -> float:
    """The chance that at least one of k answers is right, from `right` of `count` (Chen et al. 2021, arXiv 2107.03374).

    ValueError where k is more than the answers there are.
    """
    if not 1 <= k <= count:
        raise ValueError(
            f"pass_at_k: k must be between 1 and the {count} answers there are, got {k}"
        )
    return 1.0 - math.comb(count - right, k) / math.comb(count, k)


def distinct_ngrams(answers: Sequence[Sequence[int]], n: int) -> float | None:
    """Different n-grams over all n-grams, each answer cut to the shortest one's length; None where there are none."""
    shortest = min(map(len, answers), default=0)
    grams = [
        tuple(answer[start : start + n]) for answer in answers for start in range(shortest - n + 1)
    ]
    return len(set(grams)) / len(grams) if grams else None


def unique_share(answers: Sequence[object]) -> float:
    """How many different answers there are, over how many."""
    return len(set(answers)) / len(answers)


def majority_agreement(answers: Sequence[object], right: Sequence[bool]) -> tuple[float, float]:
    """The share of the commonest answer, and 1 where it is right, else 0: a confidence, and whether it was earned."""
    commonest, count = Counter(answers).most_common(1)[0]
    return count / len(answers), float(right[list(answers).index(commonest)])


def similarity(answers: Sequence[Sequence[int]]) -> float | None:
    """The mean share of matching tokens over all pairs of answers, 1 where they are equal; None for fewer than two."""
    pairs = list(combinations(answers, 2))
    if not pairs:
        return None
    ratios = [
        difflib.SequenceMatcher(None, one, other, autojunk=False).ratio() for one, other in pairs
    ]
    return sum(ratios) / len(ratios)


def calibration_error(
    confidences: Sequence[float], right: Sequence[float], bins: int = 10
) -> float:
    """The expected calibration error over bins of equally many answers (Naeini et al. 2015; equal mass).

    Answers of one confidence stay in one bin, so that their order says nothing.
    """
    ordered = sorted(zip(confidences, right, strict=True))
    edges = [_after_ties(ordered, len(ordered) * number // bins) for number in range(bins + 1)]
    parts = [ordered[low:high] for low, high in pairwise(edges) if high > low]
    gaps = [abs(sum(confidence - hit for confidence, hit in part)) for part in parts]
    return sum(gaps) / len(ordered)


def _after_ties(ordered: Sequence[tuple[float, float]], edge: int) -> int:
    """The edge, moved past answers of the same confidence as the one before it."""
    while 0 < edge < len(ordered) and ordered[edge][0] == ordered[edge - 1][0]:
        edge += 1
    return edge
