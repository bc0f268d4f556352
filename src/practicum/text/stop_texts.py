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
"""Tokens that are decoded beyond those of the text: the first of them may begin within a character, which has up to 4 bytes."""


@dataclass(frozen=True)
class StopTexts:
    """Check whether a completion has come to one of some texts; they may begin and end within a token."""

    tokenizer: "PreTrainedTokenizerBase"
    texts: tuple[str, ...]

    @cached_property
    def window(self) -> int:
        """How many of the newest tokens can hold one of the texts: a token may be a single byte of a character."""
        return max(len(text.encode()) for text in self.texts) + MARGIN

    def __call__(self, tokens: Sequence[int]) -> bool:
        """Return whether the newest tokens hold one of the texts; an earlier occurrence would have ended the completion."""
        newest = str(self.tokenizer.decode(list(tokens[-self.window :]), skip_special_tokens=False))
        return any(text in newest for text in self.texts)


Check = Callable[[Sequence[Sequence[int]]], list[bool]]
"""Returns of the tokens of each completion so far whether it stops after them."""


def stop_check(params: SamplingParams, tokenizer: "PreTrainedTokenizerBase | None") -> Check:
    """Return the check whether completions stop after their tokens so far, at a stop token or at a stop text.

    Raises CapabilityError where there are stop texts and no tokenizer to read the tokens with.
    """
    ids = params.stop_ids
    if not params.stop_texts:
        return lambda completions: [tokens[-1] in ids for tokens in completions]
    if tokenizer is None:
        raise _refusal(params, "a model without a tokenizer")
    texts = StopTexts(tokenizer, params.stop_texts)
    return lambda completions: [tokens[-1] in ids or texts(tokens) for tokens in completions]


def refuse_stop_texts(params: SamplingParams, who: str) -> None:
    """Raise CapabilityError where a completion is to stop at texts, of which `who` knows nothing."""
    if params.stop_texts:
        raise _refusal(params, who)


def _refusal(params: SamplingParams, who: str) -> CapabilityError:
    return CapabilityError(
        f"stop_texts {list(params.stop_texts)}: {who} ends an answer at stop tokens alone; write stop_ids"
    )
