"""A stream of strings to reverse whose letters change: topic after topic, in order."""

import random
from typing import Literal

from pydantic import Field, model_validator

from practicum.core.randomness import seed_of
from practicum.ports import Task, TaskConfig, TaskContext
from practicum.rows import PromptSet
from practicum.rows.words import check_enough, sample_words
from practicum.types import Message, Prompt


class Config(TaskConfig):
    """The letters of each topic, and the number and lengths of its strings."""

    type: Literal["topics"] = "topics"
    topics: list[str] = Field(
        default=["abcdef", "ghijkl"], min_length=1, description="the letters of each topic"
    )
    shortest: int = Field(default=2, ge=1, description="letters of the shortest string")
    longest: int = Field(default=3, ge=1, le=1000, description="letters of the longest string")
    train_size: int = Field(default=128, ge=1, description="strings per topic to train on")
    heldout_size: int = Field(default=32, ge=0, description="other strings per topic")

    @model_validator(mode="after")
    def _check_topics(self) -> "Config":
        for letters in self.topics:
            count = self.train_size + self.heldout_size
            check_enough(letters, self.shortest, self.longest, count, "strings")
        return self


class TopicStream(PromptSet):
    """Prompts that are trained on in their order."""

    @property
    def is_stream(self) -> bool:
        """Return True."""
        return True


def build(config: Config, context: TaskContext) -> Task:
    """Draw distinct strings of each topic; the held-out strings are of all topics."""
    draw = random.Random(seed_of(context.seed, "topics"))
    train: list[Prompt] = []
    heldout: list[Prompt] = []
    for letters in config.topics:
        count = config.heldout_size + config.train_size
        words = sample_words(draw, letters, config.shortest, config.longest, count)
        prompts = [Prompt(word, (Message("user", word),), answer=word[::-1]) for word in words]
        heldout += prompts[: config.heldout_size]
        train += prompts[config.heldout_size :]
    return TopicStream(train=train, heldout=heldout)
