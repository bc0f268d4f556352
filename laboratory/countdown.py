"""Counting down: answers of 259 to 295 tokens of SmolLM2, in which each number can be checked.

A prompt is `List the numbers 87, 86, 85 and so on, down to 19.`, its answer `87, 86, ..., 19`. The reward is the share of the
numbers that are right at their place. Prompts are drawn by the run's seed.
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
"""The differences of the first and the last number."""

HIGHEST = 89
"""The largest number. From 91 on, SmolLM2 counts up after two numbers, even with worked examples."""

EXAMPLES = ((87, 19), (85, 18))
"""Pairs for worked examples, which are in no prompt."""


class Config(TaskConfig):
    """The number of prompts."""

    type: Literal["laboratory.countdown"] = "laboratory.countdown"
    train_size: int = Field(default=64, ge=1)
    heldout_size: int = Field(default=24, ge=0)


def build(config: Config, context: TaskContext) -> PromptSet:
    """Draw distinct pairs of numbers, the held-out ones first."""
    pairs = [(last + steps, last) for steps in STEPS for last in range(10, HIGHEST + 1 - steps)]
    pairs = [pair for pair in pairs if pair not in EXAMPLES]
    random.Random(seed_of(context.seed, "countdown")).shuffle(pairs)
    end = config.heldout_size + config.train_size
    prompts = [_build_prompt(*pair) for pair in pairs[:end]]
    return PromptSet(
        heldout=prompts[: config.heldout_size],
        train=prompts[config.heldout_size :],
        verify=share_right,
    )


def _build_prompt(first: int, last: int) -> Prompt:
    text = f"List the numbers {first}, {first - 1}, {first - 2} and so on, down to {last}."
    answer = ", ".join(map(str, range(first, last - 1, -1)))
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
