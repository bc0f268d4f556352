"""The openings of conversations: who speaks in one, from which seed, and what was said before."""

from dataclasses import dataclass

from practicum.ports import PromptedClient
from practicum.rollouts.answer_tokens import Tokens
from practicum.types import Prompt, Turn


@dataclass(frozen=True, slots=True)
class Beginning:
    """The turns with which a conversation begins: whole ones, of the model or of others.

    If the last turn is the assistant's, the environment is asked for its answer first.
    """

    tokens: Tokens
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class ConversationRequest:
    """A conversation to run: its prompt, the model with its rendered prompt, and a seed.

    Another model, `opening`, speaks the first `opening_turns` turns of the model, if there are any.
    With a `beginning`, its turns are played to the environment again, which has to answer as it did;
    `episode_seed` is that of the conversation in which it did, without it that of this one.
    """

    prompt: Prompt
    prompted_client: PromptedClient
    seed: int
    opening: PromptedClient | None = None
    opening_turns: int = 0
    beginning: Beginning | None = None
    episode_seed: int | None = None
