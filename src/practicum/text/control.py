"""Control tokens in text that is not a template: found, and broken up so that no tokenizer reads them as tokens."""

import re
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NONCHARACTER = "\ufdd0"


def control_pattern(tokenizer: "PreTrainedTokenizerBase", template: str) -> re.Pattern[str] | None:
    """Matches the text of each control token: the special ones, and the added ones that the template writes.

    Other added tokens, such as the runs of spaces of some vocabularies, are ordinary text. A token of one character
    cannot be broken up, so it is not looked for.
    """
    added = tokenizer.added_tokens_decoder.values()
    names = [
        token.content
        for token in added
        if token.special or (token.content.strip() and token.content in template)
    ]
    longest_first = sorted({name for name in names if len(name) > 1}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def find_unused_marker(*texts: str) -> str:
    """A run of characters that occurs in none of the texts."""
    mark = _NONCHARACTER
    while any(mark in text for text in texts):
        mark += _NONCHARACTER
    return mark


def broken(text: str, control: re.Pattern[str], mark: str) -> str:
    """The text with `mark` after the first character of each control token in it."""
    cuts: list[int] = []
    found = control.search(text)
    while found is not None:
        cuts.append(found.start() + 1)
        # Searching on from inside the match finds control tokens that overlap with it.
        found = control.search(text, found.start() + 1)
    edges = [0, *cuts, len(text)]
    return mark.join(text[start:end] for start, end in pairwise(edges))
