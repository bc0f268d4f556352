"""Texts as a tree of segments with shared prefixes, and the number of texts that fit in a pass."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass

from practicum.types import ScoreRequest

FEWEST_SAVED_TOKENS = 16
"""The fewest saved tokens for which a shared prefix is worth its overhead."""

MOST_EVEN_SLICES = 4
"""With more slices than this, filling one slice after another is nearly even."""

MAX_FOLLOWING = 12
"""The most tokens after a shared prefix, per saved token, for which sharing is worth its overhead."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one or more texts: the first one's position and the parent's index."""

    tokens: tuple[int, ...]
    start: int
    parent: int | None


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """The prefixes that texts share: `root` tokens of all, and the rest of each of the `prompts`."""

    root: int
    prompts: frozenset[tuple[int, ...]]


def find_shared_prefixes(texts: Sequence[tuple[tuple[int, ...], int]]) -> SharedPrefixes:
    """Return the prefixes that are worth sharing; a text is a prompt and the number of tokens after
    it.

    Repeated prompts also share their tokens after the root.
    """
    uses = Counter(prompt for prompt, _ in texts)
    following: Counter[tuple[int, ...]] = Counter()
    for prompt, count in texts:
        following[prompt] += count
    root = count_shared_prefix(list(uses))
    after_root = sum(len(prompt) - root + count for prompt, count in texts)
    root = root if _pays(root, len(texts), after_root) else 0
    prompts = frozenset(
        prompt
        for prompt, count in uses.items()
        if count > 1 and _pays(len(prompt) - root, count, following[prompt])
    )
    return SharedPrefixes(root, prompts)


def _pays(prefix: int, texts: int, following: int) -> bool:
    """Return True if sharing a prefix pays; `following` tokens follow it in all texts together."""
    # In a body of width D, the products of a token take 24 D D operations per layer, and a query
    # with one key 4 D. Sharing saves a token's products in every text except the first. It costs
    # each of the L tokens after it half a block of masked keys, 128 of 256, which attention without
    # a mask skips. Both are equal at L = 24 D / (4 * 128) for each saved token, which is 12 at D =
    # 256; wider models gain more. One attention call per layer costs as much as a few tokens.
    saved = prefix * (texts - 1)
    return saved >= FEWEST_SAVED_TOKENS and following <= MAX_FOLLOWING * saved


def split_into_segments(texts: Sequence[ScoreRequest]) -> tuple[list[Segment], list[int]]:
    """Return the segments, and the index of each text's last segment.

    A segment comes after its parent. A text's last token is left out, because it predicts nothing.
    """
    prefixes = find_shared_prefixes(
        [(text.prompt_tokens, max(len(text.tokens) - 1, 0)) for text in texts]
    )
    root = prefixes.root
    # At most three levels: the common prefix of all prompts, the rest of a prompt, and its
    # completions.
    segments = [Segment(texts[0].prompt_tokens[:root], 0, None)] if root else []
    top = 0 if root else None
    shared: dict[tuple[int, ...], int] = {}
    last_segments: list[int] = []
    for text in texts:
        prompt, completion = text.prompt_tokens, text.tokens[:-1]
        if prompt not in prefixes.prompts:
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
    """Return the total number of tokens of packed texts, with shared prefixes counted once."""
    return sum(len(segment.tokens) for segment in split_into_segments(texts)[0])


def split_by_tokens(texts: Sequence[ScoreRequest], limit: int, packs_up_to: int) -> list[slice]:
    """Return slices of `texts`, in order, that cost at most `limit` tokens each or hold one text.

    There are no more slices than filling one slice after another gives. If there are only a few
    slices, their costs are similar, because the largest slice decides the memory. Beyond
    `packs_up_to` tokens texts are padded to the longest, and padding counts.
    """
    full = _fill_slices(texts, limit, packs_up_to)
    if not 1 < len(full) <= MOST_EVEN_SLICES:
        return full
    # A prefix shared by slices counts in each slice. A closed slice is less than one text below the
    # cap, so the last cap nearly always works.
    mean = -(-sum(_count_cost(texts[part], packs_up_to) for part in full) // len(full))
    longest = find_longest_text(texts)
    for cap in (mean, mean + longest // 2, mean + longest):
        even = _fill_slices(texts, cap, packs_up_to) if cap < limit else full
        if len(even) == len(full):
            return even
    return full


def _fill_slices(texts: Sequence[ScoreRequest], limit: int, packs_up_to: int) -> list[slice]:
    """Return slices that are filled one after another."""
    slices, start = [], 0
    while start < len(texts):
        stop = start + count_fitting_texts(texts, start, limit, packs_up_to)
        slices.append(slice(start, stop))
        start = stop
    return slices


def count_fitting_texts(
    texts: Sequence[ScoreRequest], start: int, limit: int, packs_up_to: int
) -> int:
    """Return how many texts from `start` on fit in a pass of `limit` tokens, at least 1."""

    def count_tokens(count: int) -> int:
        return _count_cost(texts[start : start + count], packs_up_to)

    # Doubling first: a pass holds only a few of many thousand texts, and each count reads all of
    # its texts.
    most, remaining = 1, len(texts) - start
    while most < remaining and count_tokens(most) <= limit:
        most = min(2 * most, remaining)
    return max(bisect_right(range(1, most + 1), limit, key=count_tokens), 1)


def _count_cost(texts: Sequence[ScoreRequest], packs_up_to: int) -> int:
    """Return the tokens of a pass with these texts."""
    longest = find_longest_text(texts)
    return count_packed_tokens(texts) if longest <= packs_up_to else len(texts) * longest


def find_longest_text(texts: Sequence[ScoreRequest]) -> int:
    """Return the number of tokens of the longest text."""
    return max(len(text.prompt_tokens) + len(text.tokens) for text in texts)


def find_longest_beginning(
    prompt: tuple[int, ...], texts: Container[tuple[int, ...]], lengths: Collection[int]
) -> tuple[int, ...] | None:
    """Return the longest of some texts that is a proper prefix of a prompt, or None.

    `lengths` has the distinct lengths of the texts.
    """
    for length in sorted(lengths, reverse=True):
        if length < len(prompt) and prompt[:length] in texts:
            return prompt[:length]
    return None


def count_shared_prefix(prompts: Sequence[tuple[int, ...]]) -> int:
    """Return the length of all prompts' shared prefix, which leaves each at least one token."""
    if len(prompts) < 2:
        return 0
    # In lexicographic order all prompts lie between these two, so they share what these two share.
    least, greatest = min(prompts), max(prompts)
    longest = min(map(len, prompts)) - 1
    return next((index for index in range(longest) if least[index] != greatest[index]), longest)
