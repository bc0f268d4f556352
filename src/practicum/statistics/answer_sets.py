"""Statistics of many answers to one prompt: accuracy, diversity and calibration of the confidence."""

import difflib
import math
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import combinations, pairwise

from practicum.statistics.intervals import Interval
from practicum.statistics.paired import mean_score


def pass_at_k(count: int, right: int, k: int) -> float:
    """Return the chance that one or more of k answers is right, given `right` of `count`.

    ValueError if k exceeds the number of answers. Source: Chen et al. 2021, arXiv 2107.03374.
    """
    if not 1 <= k <= count:
        raise ValueError(
            f"pass_at_k: k must be between 1 and the {count} answers there are, got {k}"
        )
    return 1.0 - math.comb(count - right, k) / math.comb(count, k)


def estimate_pass_rates(right: Sequence[Sequence[bool]], seed: int) -> dict[int, Interval]:
    """Return the mean of `pass_at_k` over prompts with its interval, by k = 1, 2, 4, ... and most.

    `right` has the answers to each prompt; the largest k is the number of answers per prompt.
    """
    most = min(map(len, right))
    numbers = sorted({*(2**power for power in range(most.bit_length())), most})
    return {
        k: mean_score([pass_at_k(len(answers), sum(answers), k) for answers in right], seed)
        for k in numbers
    }


def distinct_ngrams(answers: Sequence[Sequence[int]], n: int) -> float | None:
    """Return distinct / all n-grams of answers cut to the shortest length; None without n-grams."""
    shortest = min(map(len, answers), default=0)
    grams = [
        tuple(answer[start : start + n]) for answer in answers for start in range(shortest - n + 1)
    ]
    return len(set(grams)) / len(grams) if grams else None


def unique_share(answers: Sequence[object]) -> float:
    """Return the number of different answers over the number of answers."""
    return len(set(answers)) / len(answers)


def majority_agreement(answers: Sequence[object], right: Sequence[bool]) -> tuple[float, float]:
    """Return the share of the most common answer, and 1.0 if that answer is right, else 0.0."""
    commonest, count = Counter(answers).most_common(1)[0]
    return count / len(answers), float(right[list(answers).index(commonest)])


def equal_share(answers: Sequence[Collection[object]]) -> float:
    """Return the share of prompts that got the answer that most prompts got.

    `answers` has the answers to each prompt. For a single prompt it is 0.
    """
    if len(answers) < 2:
        return 0.0
    counts = Counter(answer for group in answers for answer in set(group))
    most = max(counts.values(), default=0)
    return most / len(answers) if most > 1 else 0.0


def similarity(answers: Sequence[Sequence[int]]) -> float | None:
    """Return the mean share of matching tokens over all pairs of answers; None for fewer than two.

    Equal answers have a share of 1.
    """
    ratios = [
        difflib.SequenceMatcher(None, first, second, autojunk=False).ratio()
        for first, second in combinations(answers, 2)
    ]
    return sum(ratios) / len(ratios) if ratios else None


def calibration_error(
    confidences: Sequence[float], right: Sequence[float], bins: int = 10
) -> float:
    """Return the expected calibration error over bins of equally many answers.

    Answers of equal confidence stay in one bin, so that their order does not matter. Source: Naeini
    et al. 2015, with bins of equal mass.
    """
    ordered = sorted(zip(confidences, right, strict=True))
    edges = [_after_ties(ordered, len(ordered) * number // bins) for number in range(bins + 1)]
    filled_bins = [ordered[low:high] for low, high in pairwise(edges) if high > low]
    gaps = [abs(sum(confidence - hit for confidence, hit in group)) for group in filled_bins]
    return sum(gaps) / len(ordered)


def _after_ties(ordered: Sequence[tuple[float, float]], edge: int) -> int:
    """Return the edge, moved past answers of the same confidence as the answer before it."""
    while 0 < edge < len(ordered) and ordered[edge][0] == ordered[edge - 1][0]:
        edge += 1
    return edge
