"""Functions: requests for short Python functions; no answer is graded.

Prompts are drawn by the run's seed. A drafter learns answers to open questions more slowly (log.md).
"""

import random
from itertools import product
from typing import Literal

from pydantic import Field

from practicum.core.randomness import seed_of
from practicum.ports import TaskConfig, TaskContext
from practicum.rows import PromptSet
from practicum.types import Message, Prompt

ACTIONS = """
returns the sum of|returns the largest element of|returns the smallest element of|reverses|sorts|removes duplicates from
counts the elements of|doubles each element of|returns the first element of|prints the elements of|returns the average of
finds the index of a value in|joins the elements of|returns every second element of|checks whether a value is in
squares each element of|filters the even elements of|splits in two halves|counts how often each element occurs in|shuffles
"""

THINGS = """
a list of numbers|a list of strings|a tuple|a list of prices|a string|a list of dates|an array|a list of ages
the lines of a file|a set of words|a queue|a list of grades|the values of a dictionary|a list of temperatures
"""


class Config(TaskConfig):
    """The number of prompts, at most 280 together."""

    type: Literal["laboratory.functions"] = "laboratory.functions"
    train_size: int = Field(default=240, ge=1)
    heldout_size: int = Field(default=24, ge=0)


def build(config: Config, context: TaskContext) -> PromptSet:
    """Draw distinct prompts, the held-out ones first."""
    prompts = [_build_prompt(*pair) for pair in product(*map(_split, (ACTIONS, THINGS)))]
    random.Random(seed_of(context.seed, "functions")).shuffle(prompts)
    end = config.heldout_size + config.train_size
    return PromptSet(
        heldout=prompts[: config.heldout_size], train=prompts[config.heldout_size : end]
    )


def _split(words: str) -> list[str]:
    return words.strip().replace("\n", "|").split("|")


def _build_prompt(action: str, thing: str) -> Prompt:
    text = f"Write a Python function that {action} {thing}."
    return Prompt(text, (Message("user", text),))
