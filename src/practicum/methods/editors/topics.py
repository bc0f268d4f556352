"""A stream of strings to reverse, topic after topic: each topic has its letters."""

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
            check_enough(letters, self.shortest, self.longest, self.strings_per_topic, "strings")
        return self

    @property
    def strings_per_topic(self) -> int:
        """The strings to draw per topic, so that enough are left without the held-out ones of all."""
        return self.train_size + self.heldout_size * len(self.topics)


class TopicStream(PromptSet):
    """Prompts that are trained on in their order."""

    @property
    def is_stream(self) -> bool:
        """Return True."""
        return True


def build(config: Config, context: TaskContext) -> Task:
    """Draw distinct strings of each topic; the held-out strings alternate between the topics.

    Topics may share letters. No held-out string of any topic is trained on.
    """
    draw = random.Random(seed_of(context.seed, "topics"))
    by_topic = [
        sample_words(draw, letters, config.shortest, config.longest, config.strings_per_topic)
        for letters in config.topics
    ]
    heldout = [
        (number, words[index])
        for index in range(config.heldout_size)
        for number, words in enumerate(by_topic)
    ]
    excluded = {word for _, word in heldout}
    train: list[tuple[int, str]] = []
    for number, words in enumerate(by_topic):
        free = [word for word in words if word not in excluded]
        train += [(number, word) for word in free[: config.train_size]]
    return TopicStream(
        train=[_build_prompt(*entry) for entry in train],
        heldout=[_build_prompt(*entry) for entry in heldout],
    )


def _build_prompt(topic: int, word: str) -> Prompt:
    return Prompt(f"{topic}-{word}", (Message("user", word),), answer=word[::-1])
