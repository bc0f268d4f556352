"""Find control tokens in text that is not a template, and split them so that they stay text."""

import re
from collections.abc import Collection
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NONCHARACTER = "\ufdd0"


def compile_control_pattern(
    tokenizer: "PreTrainedTokenizerBase", template: str, without: Collection[str] = ()
) -> re.Pattern[str]:
    """Return a pattern for control tokens: special tokens, and added ones that the template uses.

    Other added tokens, such as the runs of spaces of some vocabularies, are ordinary text. A token
    of one character cannot be split, so the pattern leaves it out.
    """
    added = tokenizer.added_tokens_decoder.values()
    names = {
        token.content
        for token in added
        if token.content not in without
        and (token.special or (token.content.strip() and token.content in template))
    }
    # Python takes the first alternative that matches, so a name must precede its own prefixes.
    longest_first = sorted((name for name in names if len(name) > 1), key=len, reverse=True)
    matches_nothing = "(?!)"
    return re.compile("|".join(map(re.escape, longest_first)) or matches_nothing)


def find_unused_marker(*texts: str) -> str:
    """Return a run of characters that does not occur in any of the texts."""
    marker = _NONCHARACTER
    while any(marker in text for text in texts):
        marker += _NONCHARACTER
    return marker


def split_control_tokens(text: str, control: re.Pattern[str]) -> list[str]:
    """Split the text after the first character of each control token in it.

    No tokenizer reads a control token from pieces that it encodes one by one.
    """
    cuts: list[int] = []
    match = control.search(text)
    while match is not None:
        cuts.append(match.start() + 1)
        # Search on from inside the match, to find control tokens that overlap with it.
        match = control.search(text, match.start() + 1)
    return [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
