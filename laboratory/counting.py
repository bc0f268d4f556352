"""Counting: answers of 259 to 295 tokens of SmolLM2, in which each number can be checked.

A prompt is `Count from 17 to 88.`, its answer `17, 18, ..., 88`. The reward is the share of the numbers that are right at their
place. Prompts are drawn by the run's seed. Down instead of up was tried first: SmolLM2 does not do that with a worked example.
"""

import random
import re
from typing import Literal

from pydantic import Field

from practicum.core.randomness import seed_of
from practicum.ports import TaskConfig, TaskContext
from practicum.rows import PromptSet
from practicum.types import Message, Prompt

STEPS = range(65, 75)
"""The differences of the last and the first number, which both have two digits."""

EXAMPLE = (17, 88)
"""The pair of the worked example, which is in no prompt."""


class Config(TaskConfig):
    """The number of prompts."""

    type: Literal["laboratory.counting"] = "laboratory.counting"
    train_size: int = Field(default=128, ge=1)
    heldout_size: int = Field(default=24, ge=0)


def build(config: Config, context: TaskContext) -> PromptSet:
    """Draw distinct pairs of numbers, the held-out ones first."""
    pairs = [(first, first + steps) for steps in STEPS for first in range(10, 100 - steps)]
    pairs.remove(EXAMPLE)
    random.Random(seed_of(context.seed, "counting")).shuffle(pairs)
    end = config.heldout_size + config.train_size
    prompts = [_build_prompt(*pair) for pair in pairs[:end]]
    return PromptSet(
        heldout=prompts[: config.heldout_size],
        train=prompts[config.heldout_size :],
        verify=share_right,
    )


def _build_prompt(first: int, last: int) -> Prompt:
    text = f"Count from {first} to {last}."
    answer = ", ".join(map(str, range(first, last + 1)))
    return Prompt(text, (Message("user", text),), answer=answer)


def share_right(reply: str, answer: str) -> float:
    """Return the share of right numbers, of the longer of the reply and the answer."""
    right = find_right(reply, answer)
    return sum(right) / max(len(right), len(_read_numbers(reply)))


def find_right(reply: str, answer: str) -> list[bool]:
    """Return for each number of the answer whether the reply has it at the same place."""
    numbers = _read_numbers(reply)
    return [
        numbers[place : place + 1] == [number] for place, number in enumerate(_read_numbers(answer))
    ]


def _read_numbers(text: str) -> list[str]:
    return re.findall(r"\d+", text)
