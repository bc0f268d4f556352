"""Reverse a short string: the built-in task for tests and newcomers, without a download."""

import random
from typing import Literal

from pydantic import Field, model_validator

from practicum.core.randomness import seed_of
from practicum.ports import Task, TaskConfig, TaskContext
from practicum.rows import PromptSet
from practicum.rows.words import check_enough, sample_words
from practicum.types import Message, Prompt


class Config(TaskConfig):
    """The strings: their letters, and their lengths from `shortest` to `longest`."""

    type: Literal["reverse"] = "reverse"
    alphabet: str = Field(default="abcdefgh", min_length=2, description="the letters, each once")
    shortest: int = Field(default=3, ge=1, description="letters of the shortest string")
    longest: int = Field(default=5, ge=1, le=1000, description="letters of the longest string")
    train_size: int = Field(default=512, ge=1, description="strings to train on")
    seed: int | None = Field(
        default=None, ge=0, description="seed of the strings; none: the run's seed"
    )
    heldout_size: int = Field(default=64, ge=0, description="other strings, to evaluate on")

    @model_validator(mode="after")
    def _check_alphabet(self) -> "Config":
        if len(set(self.alphabet)) < len(self.alphabet):
            raise ValueError(f"alphabet {self.alphabet!r} repeats a letter; write each letter once")
        if any(letter.isspace() for letter in self.alphabet):
            raise ValueError(
                f"alphabet {self.alphabet!r} contains a space; use letters that are seen"
            )
        count = self.train_size + self.heldout_size
        check_enough(self.alphabet, self.shortest, self.longest, count, "strings")
        return self


def build(config: Config, context: TaskContext) -> Task:
    """Draw distinct strings, the held-out ones first: they do not depend on `train_size`."""
    draw = random.Random(seed_of(context.seed if config.seed is None else config.seed, "reverse"))
    count = config.heldout_size + config.train_size
    words = sample_words(draw, config.alphabet, config.shortest, config.longest, count)
    prompts = [Prompt(word, (Message("user", word),), answer=word[::-1]) for word in words]
    return PromptSet(train=prompts[config.heldout_size :], heldout=prompts[: config.heldout_size])
