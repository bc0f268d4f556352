"""The start of a conversation: its speakers, its seed, and its earlier turns."""

from dataclasses import dataclass

from practicum.ports import PromptedClient
from practicum.rollouts.answer_tokens import Tokens
from practicum.types import Prompt, Turn


@dataclass(frozen=True, slots=True)
class Beginning:
    """The initial turns of a conversation: complete turns, of the model or of other speakers.

    If the last turn is the assistant's, the environment answers first.
    """

    tokens: Tokens
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class ConversationRequest:
    """A conversation to run: its prompt, the model with its rendered prompt, and a seed.

    With an `opening`, this other model speaks the first `opening_turns` of the model's turns. With a
    `beginning`, its turns are replayed to the environment, which must give the same answers;
    `episode_seed` is then the episode seed of the original conversation. Without it, the seed is
    derived from the conversation's own seed.
    """

    prompt: Prompt
    prompted_client: PromptedClient
    seed: int
    opening: PromptedClient | None = None
    opening_turns: int = 0
    beginning: Beginning | None = None
    episode_seed: int | None = None
