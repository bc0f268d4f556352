"""Any generator of reasoning-gym by name, scored by its own verifier.

The verifier runs in a process of its own with a deadline, because generators may evaluate what a model wrote.
"""

import importlib.util
import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from practicum.errors import DataError
from practicum.objective.calls import did_you_mean
from practicum.ports import Task
from practicum.randomness import seed_of
from practicum.tasks import TaskContext
from practicum.tasks._deadline import Deadline
from practicum.types import Message, Prompt


class Config(BaseModel):
    """Which generator, with which of its settings, and how many prompts."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["reasoning_gym"] = "reasoning_gym"
    generator: str = Field(description="its name, for example products or chain_sum")
    config: dict[str, Any] = Field(default={}, description="the generator's own settings")
    train_size: int = Field(default=512, ge=1)
    heldout_size: int = Field(default=64, ge=0)


class ReasoningGym:
    """Prompts drawn from one generator; see `practicum.ports.Task`."""

    def __init__(self, config: Config, seed: int) -> None:
        self._config = config
        self._seeds = {split: seed_of(seed, "reasoning_gym", split) % 2**31 for split in ("train", "heldout")}
        self._heldout = self._prompts("heldout", config.heldout_size, frozenset())
        held = frozenset(prompt.messages for prompt in self._heldout)
        self._train = self._prompts("train", config.train_size, held)
        settings = json.dumps({"generator": config.generator, "config": config.config, "seeds": self._seeds})
        self._verifier = Deadline("practicum.tasks._reasoning_gym", settings)

    def train_prompts(self) -> Sequence[Prompt]:
        """The prompts to train on; those that are also held out are left out."""
        return self._train

    def heldout_prompts(self) -> Sequence[Prompt]:
        """Prompts from another seed."""
        return self._heldout

    def reward(self, prompt: Prompt, completion: str) -> float:
        """The generator's own score of the whole reply."""
        split, _, number = prompt.id.rpartition("-")
        return self._verifier.call({"split": split, "number": int(number), "reply": completion})

    def _prompts(self, split: str, size: int, excluded: frozenset[tuple[Message, ...]]) -> list[Prompt]:
        prompts: dict[tuple[Message, ...], Prompt] = {}
        for number, item in enumerate(_items(self._config, self._seeds[split], size)):
            messages = (Message("user", str(item["question"])),)
            answer = None if item["answer"] is None else str(item["answer"])
            if messages not in excluded:
                prompts.setdefault(
                    messages, Prompt(f"{split}-{number}", messages, answer, domain=self._config.generator)
                )
        return list(prompts.values())


def build(config: Config, context: TaskContext) -> Task:
    """Generate the prompts; DataError where the package, the generator or its settings are not there."""
    task = ReasoningGym(config, context.seed)
    left_out = config.train_size - len(task.train_prompts())
    if left_out:
        context.say(f"{left_out} of {config.train_size} generated training prompts left out: repeated or held out")
    return task


def _items(config: Config, seed: int, size: int) -> list[dict[str, Any]]:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise DataError("task 'reasoning_gym' needs the package reasoning-gym; run: pip install 'practicum[tasks]'")
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if config.generator not in DATASETS:
        raise DataError(
            f"task.generator: no generator named {config.generator!r}; {did_you_mean(config.generator, DATASETS)}"
        )
    if size == 0:
        return []
    try:
        dataset = reasoning_gym.create_dataset(config.generator, seed=seed, size=size, **config.config)
        return [dataset[number] for number in range(size)]
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(
            f"task.config: the generator {config.generator!r} does not take {config.config} ({error})"
        ) from error
