"""Conversations whose messages have the tokens that they were stored with, and come back as these.

Text alone does not tell how a model spelled it, nor what a template would leave out of an earlier turn.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from practicum.errors import ModelError
from practicum.prompts import Message, Turn

if TYPE_CHECKING:
    from practicum.text.renderer import Renderer


def add_tokens(
    messages: Sequence[Message],
    prompt_tokens: Sequence[int],
    turns: Sequence[Turn],
    tokens: Sequence[int],
) -> tuple[Message, ...]:
    """Return a prompt's messages and the turns after it, each with its part of the tokens.

    The prompt's own tokens are those of its last message.
    """
    stored = [*messages[:-1], replace(messages[-1], tokens=tuple(prompt_tokens))]
    start = 0
    for turn in turns:
        end = start + turn.tokens
        stored.append(Message(turn.role, turn.text, tokens=tuple(tokens[start:end])))
        start = end
    return tuple(stored)


def restore_tokens(messages: Sequence[Message], renderer: "Renderer") -> tuple[int, ...] | None:
    """Return the tokens of a conversation whose answers have theirs, up to the next answer.

    None if they are not the spelling of the answers' texts in this tokenizer, or if the template
    shows no earlier turns. What comes before the first of these answers is rendered. If it comes back
    as it was stored, the template is the same, and what others said comes back too; otherwise the
    template writes it.
    """
    places = (place for place, message in enumerate(messages) if _has_answer_tokens(message))
    start = next(places, 0)
    answers = [message for message in messages[start:] if message.role == "assistant"]
    if not start or not all(_is_spelling(answer, renderer) for answer in answers):
        return None
    tokens = renderer.render(messages[:start])
    is_same = tokens == messages[start - 1].tokens
    try:
        for is_answer, run in groupby(messages[start:], lambda turn: turn.role == "assistant"):
            turns = tuple(run)
            if is_answer or (is_same and all(turn.tokens for turn in turns)):
                tokens += tuple(token for turn in turns for token in turn.tokens)
            else:
                tokens += renderer.render_reply(*turns)
    except ModelError:
        # Such a template has its own way with earlier turns, which it knows as text alone.
        return None
    return tokens


def comes_back(messages: Sequence[Message], renderer: "Renderer") -> bool:
    """Return True if the messages are rendered as they were stored, or were not stored as tokens."""
    stored = tuple(token for message in messages for token in message.tokens)
    return not stored or renderer.render(messages) == stored


def _has_answer_tokens(message: Message) -> bool:
    return message.role == "assistant" and bool(message.tokens)


def _is_spelling(answer: Message, renderer: "Renderer") -> bool:
    """Return True if the answer's tokens are its text in this tokenizer, to the stop token."""
    return (
        renderer.token_ids.issuperset(answer.tokens)
        and not renderer.stop_ids.isdisjoint(answer.tokens[-1:])
        and renderer.decode(answer.tokens) == answer.content
    )
