"""Texts at which a completion stops, as a check of its tokens."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from practicum.errors import CapabilityError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from practicum.types import SamplingParams

MARGIN = 4
"""The extra tokens decoded before a text: the first may begin within a character of 4 bytes."""


Check = Callable[[Sequence[Sequence[int]]], list[bool]]
"""Return for each completion, given its tokens so far, True if it stops after them."""


def stop_check(params: "SamplingParams", tokenizer: "PreTrainedTokenizerBase | None") -> Check:
    """Return the check for the end of completions, at a stop token or at a stop text.

    Raises CapabilityError if there are stop texts and no tokenizer to decode tokens with.
    """
    ids = params.stop_ids
    if not params.stop_texts:
        return lambda completions: [tokens[-1] in ids for tokens in completions]
    if tokenizer is None:
        raise _build_refusal(params, "a model without a tokenizer")
    # A token may be a single byte of a character, and an earlier occurrence would have ended the
    # completion, so the newest tokens, one for each byte, are enough.
    window = max(len(text.encode()) for text in params.stop_texts) + MARGIN

    def holds_stop_text(tokens: Sequence[int]) -> bool:
        newest = str(tokenizer.decode(list(tokens[-window:]), skip_special_tokens=False))
        return any(text in newest for text in params.stop_texts)

    return lambda completions: [
        tokens[-1] in ids or holds_stop_text(tokens) for tokens in completions
    ]


def refuse_stop_texts(params: "SamplingParams", who: str) -> None:
    """Raise CapabilityError if completions are to stop at texts, which `who` does not support."""
    if params.stop_texts:
        raise _build_refusal(params, who)


def refuse_banned_ids(params: "SamplingParams", who: str) -> None:
    """Raise CapabilityError if tokens must not be sampled, which `who` cannot promise."""
    if params.banned_ids:
        raise CapabilityError(
            f"{who} cannot ban the {len(params.banned_ids)} tokens that the student lacks; use it "
            "only for scoring: set rollout.source: student and evaluation.teacher: false"
        )


def _build_refusal(params: "SamplingParams", who: str) -> CapabilityError:
    return CapabilityError(
        f"stop_texts {list(params.stop_texts)}: {who} ends an answer only at stop tokens; "
        "set stop_ids"
    )
