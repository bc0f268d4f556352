"""Explanations: open questions about everyday things, answered in a few sentences; no answer is graded.

Prompts are drawn by the run's seed.
"""

import random
from itertools import product
from typing import Literal

from pydantic import Field

from practicum.core.randomness import seed_of
from practicum.ports import TaskConfig, TaskContext
from practicum.rows import PromptSet
from practicum.types import Message, Prompt

QUESTIONS = (
    "What is {}?",
    "Explain {} to a child.",
    "Write three sentences about {}.",
    "Why is {} useful?",
    "Give me some advice about {}.",
)

TOPICS = (
    """
a bicycle|a library|the moon|rain|a computer|bread|a garden|music|the heart|a bridge|a train|sleep|the ocean|a farm|coffee|honey
a volcano|winter|a map|a clock|money|friendship|a camera|a forest|a hospital|electricity|a river|a telescope|chess|swimming|paint
glass|a kite|a magnet|a museum|the desert|a lighthouse|a recipe|exercise|a dictionary|a calendar|soap|paper|a battery|a robot|salt
a newspaper|a teacher|a tree|an island|an airplane|gravity|a sandwich|cheese|a dog|a cat|a bee|a whale|a spider|an elephant
""".strip()
    .replace("\n", "|")
    .split("|")
)


class Config(TaskConfig):
    """The number of prompts."""

    type: Literal["laboratory.explanations"] = "laboratory.explanations"
    train_size: int = Field(default=250, ge=1)
    heldout_size: int = Field(default=32, ge=0)


def build(config: Config, context: TaskContext) -> PromptSet:
    """Draw distinct prompts, the held-out ones first, about topics of their own."""
    stream = random.Random(seed_of(context.seed, "explanations"))
    topics = stream.sample(TOPICS, len(TOPICS))
    count = -(-config.heldout_size // len(QUESTIONS))
    heldout, train = (
        [_build_prompt(question.format(topic)) for question, topic in product(QUESTIONS, part)]
        for part in (topics[:count], topics[count:])
    )
    stream.shuffle(train)
    return PromptSet(heldout=heldout[: config.heldout_size], train=train[: config.train_size])


def _build_prompt(text: str) -> Prompt:
    return Prompt(text, (Message("user", text),))
