"""Texts as a tree of segments: what several begin with stands once, and how many texts fit in a pass follows from it."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from practicum.types import ScoreRequest

SHORTEST_SHARED_PREFIX = 16
"""Below this many common tokens a shared beginning is not worth a segment of its own."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Some consecutive tokens of one or more texts, and the segment that they come after."""

    tokens: tuple[int, ...]
    start: int
    parent: int | None


def segments_of(texts: Sequence[ScoreRequest]) -> tuple[list[Segment], list[int]]:
    """The segments, and the last segment of each text; a text's last token is never read, for it predicts nothing."""
    uses: dict[tuple[int, ...], int] = {}
    for text in texts:
        uses[text.prompt_tokens] = uses.get(text.prompt_tokens, 0) + 1
    root = common_beginning(list(uses))
    segments = [Segment(next(iter(uses))[:root], 0, None)] if root else []
    top = 0 if root else None
    shared: dict[tuple[int, ...], int] = {}
    of_text: list[int] = []
    for text in texts:
        prompt, answer = text.prompt_tokens, text.tokens[:-1]
        if uses[prompt] == 1 or len(prompt) - root < SHORTEST_SHARED_PREFIX:
            segments.append(Segment((*prompt[root:], *answer), root, top))
        else:
            if prompt not in shared:
                shared[prompt] = len(segments)
                segments.append(Segment(prompt[root:], root, top))
            if not answer:
                of_text.append(shared[prompt])
                continue
            segments.append(Segment(answer, len(prompt), shared[prompt]))
        of_text.append(len(segments) - 1)
    return segments, of_text


def packed_tokens(texts: Sequence[ScoreRequest]) -> int:
    """How many tokens are read of texts that are packed together: what they share counts once."""
    return sum(len(segment.tokens) for segment in segments_of(texts)[0])


def how_many_fit(texts: Sequence[ScoreRequest], limit: int, packs_up_to: int) -> int:
    """How many of the first texts, at least one, are read together as no more than `limit` tokens.

    Beyond `packs_up_to` tokens texts are padded, and padding counts.
    """

    def read(count: int) -> int:
        longest = max(len(text.prompt_tokens) + len(text.tokens) for text in texts[:count])
        return packed_tokens(texts[:count]) if longest <= packs_up_to else count * longest

    most = 1
    while most < len(texts) and read(most) <= limit:
        most = min(2 * most, len(texts))
    return max(bisect_right(range(1, most + 1), limit, key=read), 1)


def common_beginning(prompts: Sequence[tuple[int, ...]]) -> int:
    """How many first tokens several prompts share, at least one of each left over; 0 where sharing does not pay."""
    if len(prompts) < 2:
        return 0
    least, greatest = (
        min(prompts),
        max(prompts),
    )  # what these two share is shared by all between them
    longest = min(map(len, prompts)) - 1
    shared = next((place for place in range(longest) if least[place] != greatest[place]), longest)
    return shared if shared >= SHORTEST_SHARED_PREFIX else 0
