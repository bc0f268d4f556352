"""Texts at which a completion stops, as a check of its tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from practicum.errors import CapabilityError
from practicum.types import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARGIN = 4
"""The extra tokens decoded before a text: the first may begin within a character of 4 bytes."""


@dataclass(frozen=True)
class StopTexts:
    """A check for texts that end a completion; they may begin and end within a token."""

    tokenizer: "PreTrainedTokenizerBase"
    texts: tuple[str, ...]

    @cached_property
    def window(self) -> int:
        """Return the number of newest tokens that can hold one of the texts."""
        # A token may be a single byte of a character.
        return max(len(text.encode()) for text in self.texts) + MARGIN

    def __call__(self, tokens: Sequence[int]) -> bool:
        """Return True if the newest tokens hold one of the texts."""
        # An earlier occurrence would have ended the completion, so the newest tokens suffice.
        newest = str(self.tokenizer.decode(list(tokens[-self.window :]), skip_special_tokens=False))
        return any(text in newest for text in self.texts)


Check = Callable[[Sequence[Sequence[int]]], list[bool]]
"""Return for each completion, given its tokens so far, True if it stops after them."""


def stop_check(params: SamplingParams, tokenizer: "PreTrainedTokenizerBase | None") -> Check:
    """Return the check for the end of completions, at a stop token or at a stop text.

    Raises CapabilityError if there are stop texts and no tokenizer to decode tokens with.
    """
    ids = params.stop_ids
    if not params.stop_texts:
        return lambda completions: [tokens[-1] in ids for tokens in completions]
    if tokenizer is None:
        raise _build_refusal(params, "a model without a tokenizer")
    texts = StopTexts(tokenizer, params.stop_texts)
    return lambda completions: [tokens[-1] in ids or texts(tokens) for tokens in completions]


def refuse_stop_texts(params: SamplingParams, who: str) -> None:
    """Raise CapabilityError if completions are to stop at texts, which `who` does not support."""
    if params.stop_texts:
        raise _build_refusal(params, who)


def _build_refusal(params: SamplingParams, who: str) -> CapabilityError:
    return CapabilityError(
        f"stop_texts {list(params.stop_texts)}: {who} ends an answer at stop tokens alone; "
        "write stop_ids"
    )
