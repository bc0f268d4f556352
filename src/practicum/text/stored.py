"""Add the stored tokens to the messages of a conversation.

`Renderer.render` renders the messages with these tokens. The text does not determine how a model
tokenized it, nor what a template would leave out of an earlier turn.
"""

from collections.abc import Sequence
from dataclasses import replace

from practicum.prompts import Message, Turn


def add_tokens(
    messages: Sequence[Message],
    prompt_tokens: Sequence[int],
    turns: Sequence[Turn],
    tokens: Sequence[int],
) -> tuple[Message, ...]:
    """Return a prompt's messages and the turns after it, each with its part of the tokens.

    All tokens of the prompt are stored on its last message.
    """
    stored = [*messages[:-1], replace(messages[-1], tokens=tuple(prompt_tokens))]
    start = 0
    for turn in turns:
        end = start + turn.tokens
        stored.append(Message(turn.role, turn.text, tokens=tuple(tokens[start:end])))
        start = end
    return tuple(stored)
