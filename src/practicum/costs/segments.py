"""Texts as a tree of segments with shared prefixes, and the number of texts that fit in a pass."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from practicum.types import ScoreRequest

SHORTEST_SHARED_PREFIX = 16
"""The fewest common tokens that are worth a segment of their own."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one or more texts: the first one's position and the parent's index."""

    tokens: tuple[int, ...]
    start: int
    parent: int | None


def split_into_segments(texts: Sequence[ScoreRequest]) -> tuple[list[Segment], list[int]]:
    """Return the segments, and the index of each text's last segment.

    A segment stands after its parent. A text's last token is left out, because it predicts nothing.
    """
    uses = Counter(text.prompt_tokens for text in texts)
    root = count_shared_prefix(list(uses))
    # At most three levels: what all prompts begin with, the rest of a prompt, and its completions.
    segments = [Segment(next(iter(uses))[:root], 0, None)] if root else []
    top = 0 if root else None
    shared: dict[tuple[int, ...], int] = {}
    last_segments: list[int] = []
    for text in texts:
        prompt, completion = text.prompt_tokens, text.tokens[:-1]
        if uses[prompt] == 1 or len(prompt) - root < SHORTEST_SHARED_PREFIX:
            segments.append(Segment((*prompt[root:], *completion), root, top))
        else:
            if prompt not in shared:
                shared[prompt] = len(segments)
                segments.append(Segment(prompt[root:], root, top))
            if not completion:
                last_segments.append(shared[prompt])
                continue
            segments.append(Segment(completion, len(prompt), shared[prompt]))
        last_segments.append(len(segments) - 1)
    return segments, last_segments


def count_packed_tokens(texts: Sequence[ScoreRequest]) -> int:
    """Return the number of tokens that packed texts have together, shared prefixes counted once."""
    return sum(len(segment.tokens) for segment in split_into_segments(texts)[0])


def count_fitting_texts(texts: Sequence[ScoreRequest], limit: int, packs_up_to: int) -> int:
    """Return how many of the first texts fit in a pass of `limit` tokens, at least 1.

    Beyond `packs_up_to` tokens texts are padded to the longest, and padding counts.
    """

    def count_tokens(count: int) -> int:
        longest = max(len(text.prompt_tokens) + len(text.tokens) for text in texts[:count])
        return count_packed_tokens(texts[:count]) if longest <= packs_up_to else count * longest

    # Doubling first: a pass holds few of many thousand texts, and each count goes over all of them.
    most = 1
    while most < len(texts) and count_tokens(most) <= limit:
        most = min(2 * most, len(texts))
    return max(bisect_right(range(1, most + 1), limit, key=count_tokens), 1)


def count_shared_prefix(prompts: Sequence[tuple[int, ...]]) -> int:
    """Return how many first tokens all prompts share, or 0 if sharing them does not pay.

    At least one token of each prompt is left over.
    """
    if len(prompts) < 2:
        return 0
    # In lexicographic order all prompts lie between these two, so they share what these two share.
    least, greatest = min(prompts), max(prompts)
    longest = min(map(len, prompts)) - 1
    shared = next((index for index in range(longest) if least[index] != greatest[index]), longest)
    return shared if shared >= SHORTEST_SHARED_PREFIX else 0
