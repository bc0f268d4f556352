"""Reverse a short string: the built-in task of tests and newcomers, with nothing to download."""

import random
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from practicum.ports import Task
from practicum.randomness import seed_of
from practicum.tasks import TaskContext
from practicum.types import Message, Prompt


class Config(BaseModel):
    """Which strings: letters of the alphabet, `shortest` to `longest` of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["reverse"] = "reverse"
    alphabet: str = "abcdefgh"
    shortest: int = Field(default=3, ge=1)
    longest: int = Field(default=5, ge=1)
    train_size: int = Field(default=512, ge=1)
    heldout_size: int = Field(default=64, ge=0)


class Reverse:
    """Seeded strings, all different; see `practicum.ports.Task`."""

    def __init__(self, config: Config, seed: int) -> None:
        draw = random.Random(seed_of(seed, "reverse"))
        words: dict[str, None] = {}
        while len(words) < config.train_size + config.heldout_size:
            length = draw.randint(config.shortest, config.longest)
            words["".join(draw.choices(config.alphabet, k=length))] = None
        prompts = [Prompt(word, (Message("user", word),), answer=word[::-1]) for word in words]
        self._train, self._heldout = prompts[: config.train_size], prompts[config.train_size :]

    def train_prompts(self) -> Sequence[Prompt]:
        """The strings to train on."""
        return self._train

    def heldout_prompts(self) -> Sequence[Prompt]:
        """Other strings."""
        return self._heldout

    def reward(self, prompt: Prompt, completion: str) -> float:
        """1 for the exact reverse, else 0."""
        return float(completion.strip() == prompt.answer)


def build(config: Config, context: TaskContext) -> Task:
    """Draw the strings."""
    return Reverse(config, context.seed)
