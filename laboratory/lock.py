"""Combination locks: only trying finds a code, and only a complete code is rewarded."""

import random
from typing import Literal

from pydantic import Field, model_validator

from practicum.core.randomness import seed_of
from practicum.ports import Task, TaskConfig, TaskContext
from practicum.rows import PromptSet
from practicum.rows.words import check_letters
from practicum.types import Message, Prompt

MOST_LOCKS = 26


class Config(TaskConfig):
    """The number of locks, and the length and letters of their codes."""

    type: Literal["laboratory.lock"] = "laboratory.lock"
    locks: int = Field(
        default=4, ge=1, le=MOST_LOCKS, description="number of locks, each with its own code"
    )
    length: int = Field(default=4, ge=1, le=100, description="letters per code")
    letters: str = Field(
        default="abcd", min_length=2, description="the letters of codes, each once"
    )
    seed: int | None = Field(
        default=None, ge=0, description="seed of the codes; none: the run's seed"
    )
    train_size: int = Field(default=256, ge=1, description="numbered tries, the locks in turn")
    heldout_size: int = Field(default=64, ge=0, description="further tries of the same locks")

    @model_validator(mode="after")
    def _check_letters(self) -> "Config":
        check_letters("letters", self.letters, "abcd")
        return self


def build(config: Config, context: TaskContext) -> Task:
    """Build numbered tries at locks, rewarded for the complete code.

    A prompt such as `B17` names the lock and the try, and contains no information about the code. Its `response`
    is a random code, so that training on the dataset only teaches the form of codes; its `answer` is the code of the lock.
    """
    draw = random.Random(seed_of(context.seed if config.seed is None else config.seed, "lock"))

    def draw_code() -> str:
        return "".join(draw.choices(config.letters, k=config.length))

    codes = [draw_code() for _ in range(config.locks)]
    prompts = []
    for number in range(config.heldout_size + config.train_size):
        lock = number % config.locks
        text = f"{chr(ord('A') + lock)}{number}"
        prompts.append(
            Prompt(text, (Message("user", text),), answer=codes[lock], response=draw_code())
        )
    return PromptSet(train=prompts[config.heldout_size :], heldout=prompts[: config.heldout_size])
