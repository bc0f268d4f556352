"""Combination locks: a code that only trying finds, rewarded where all of it is right, for what search costs."""

import random
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from practicum.core.randomness import seed_of
from practicum.ports import Task
from practicum.tasks import PromptSet, TaskContext
from practicum.types import Message, Prompt

MOST_LOCKS = 26


class Config(BaseModel):
    """How many locks, how long their codes, and of which letters."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["laboratory.lock"] = "laboratory.lock"
    locks: int = Field(default=4, ge=1, le=MOST_LOCKS, description="each with a code of its own")
    length: int = Field(default=4, ge=1, le=100, description="letters of a code")
    letters: str = Field(
        default="abcd", min_length=2, description="what codes are made of, each letter once"
    )
    seed: int | None = Field(default=None, ge=0, description="of the codes; none: the run's")
    train_size: int = Field(default=256, ge=1, description="numbered tries, the locks in turn")
    heldout_size: int = Field(default=64, ge=0, description="further tries of the same locks")

    @model_validator(mode="after")
    def _possible(self) -> "Config":
        if (
            len(set(self.letters)) < len(self.letters)
            or not self.letters.isalpha()
            or not self.letters.islower()
        ):
            raise ValueError(
                f"letters {self.letters!r}: write lower-case letters, each once, for example abcd"
            )
        return self


def build(config: Config, context: TaskContext) -> Task:
    """Numbered tries at locks, rewarded for the whole code.

    A prompt such as `B17` names the lock and the try, which says nothing of the code. Its `response` is a random code, so that
    learning from the dataset teaches what codes look like and not which are right; its `answer` is the lock's own.
    """
    draw = random.Random(seed_of(context.seed if config.seed is None else config.seed, "lock"))

    def code() -> str:
        return "".join(draw.choices(config.letters, k=config.length))

    codes = [code() for _ in range(config.locks)]
    prompts = []
    for number in range(config.heldout_size + config.train_size):
        lock = number % config.locks
        text = f"{chr(ord('A') + lock)}{number}"
        prompts.append(Prompt(text, (Message("user", text),), answer=codes[lock], response=code()))
    return PromptSet(train=prompts[config.heldout_size :], heldout=prompts[: config.heldout_size])
