"""Any generator of reasoning-gym by name, scored by its own verifier.

Both run in a sandboxed process with a deadline, because a verifier may evaluate text of a model.
"""

import importlib.util
import json
import logging
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from practicum.core.calls import suggest_name
from practicum.core.randomness import seed_of
from practicum.errors import DataError, suggest_install
from practicum.ports import Task, TaskConfig, TaskContext
from practicum.sandbox import NoLine
from practicum.sandbox.deadline import VerifierFailed, VerifierProcess, Walls
from practicum.types import Message, Prompt, Rollout

log = logging.getLogger(__name__)

ITEM_SECONDS = 60.0
_SET_BY_RECIPE = {"seed": "the recipe's seed", "size": "task.train_size and task.heldout_size"}


class Config(TaskConfig):
    """The generator, its settings, and the number of prompts."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    generator: str = Field(description="its name, for example products or chain_sum")
    config: dict[str, Any] = Field(default={}, description="the generator's own settings")
    sandbox: Walls = Field(
        default="require",
        description="if a wall around the generator is missing: refuse it, or run without the wall",
    )
    train_size: int = Field(
        default=512, ge=1, description="items drawn to train on; repeated ones are left out"
    )
    heldout_size: int = Field(
        default=64, ge=0, description="items drawn, from another seed, to evaluate on"
    )


class ReasoningGym(Task):
    """The prompts of one generator; see `practicum.ports.Task`."""

    def __init__(self, config: Config, context: TaskContext) -> None:
        sizes = {"train": config.train_size, "heldout": config.heldout_size}
        seeds = {split: seed_of(context.seed, "reasoning_gym", split) % 2**31 for split in sizes}
        settings = {"generator": config.generator, "config": config.config}
        settings |= {"seeds": seeds, "sizes": sizes}
        self._generator = config.generator
        self._process = VerifierProcess(
            "practicum.grading.run_reasoning_gym", _serialize(settings), sandbox=config.sandbox
        )
        note = self._process.check_walls()
        if note is not None:
            log.info(note)
        generators = self._list_generators()
        if config.generator not in generators:
            raise DataError(
                f"task.generator: no generator named {config.generator!r}; "
                f"{suggest_name(config.generator, generators)}"
            )
        self._heldout = self._generate("heldout", config.heldout_size, frozenset())
        excluded = frozenset(prompt.messages for prompt in self._heldout)
        self._train = self._generate("train", config.train_size, excluded)
        self._check_verifier()

    def train_prompts(self) -> Sequence[Prompt]:
        """Return the prompts to train on, without the held-out prompts."""
        return self._train

    def heldout_prompts(self) -> Sequence[Prompt]:
        """Return prompts from another seed."""
        return self._heldout

    def reward(self, rollout: Rollout) -> float:
        """Return the generator's own score of the reply, without spaces around it."""
        return self._process.call(_build_request(rollout.prompt, rollout.answer))

    def _list_generators(self) -> list[str]:
        try:
            return self._process.ask({}, ITEM_SECONDS)
        except (VerifierFailed, NoLine) as error:
            raise DataError(
                f"task.type: the package reasoning-gym does not list its generators ({error}); "
                "install another version of it"
            ) from error

    def _check_verifier(self) -> None:
        """Raise DataError if the generator's verifier fails on the generator's own answer."""
        # One check is enough: a verifier that lacks a package or cannot start fails on every
        # prompt.
        for prompt in self._train[:1]:
            if prompt.answer is not None:
                request = _build_request(prompt, prompt.answer)
                try:
                    self._process.ask(request, ITEM_SECONDS)
                except (VerifierFailed, NoLine) as error:
                    raise DataError(
                        f"task.generator: the verifier of {self._generator!r} fails on the "
                        f"generator's own answer ({error}); take another generator, or other "
                        "settings"
                    ) from error

    def _generate(
        self, split: str, size: int, excluded: frozenset[tuple[Message, ...]]
    ) -> list[Prompt]:
        prompts: dict[tuple[Message, ...], Prompt] = {}
        for number in range(size):
            entry = self._generate_entry(split, number)
            messages = (Message("user", entry["question"]),)
            if messages not in excluded:
                name, answer = f"{split}-{number}", entry["answer"]
                prompts.setdefault(messages, Prompt(name, messages, answer, domain=self._generator))
        return list(prompts.values())

    def _generate_entry(self, split: str, number: int) -> dict[str, Any]:
        try:
            return self._process.ask({"split": split, "number": number}, ITEM_SECONDS)
        except (VerifierFailed, NoLine) as error:
            raise DataError(
                f"task.config: the generator {self._generator!r} cannot make item {number} "
                f"({error}); change its settings"
            ) from error


def _build_request(prompt: Prompt, reply: str) -> dict[str, Any]:
    split, _, number = prompt.id.rpartition("-")
    return {"split": split, "number": int(number), "reply": reply.strip()}


def build(config: Config, context: TaskContext) -> Task:
    """Generate the prompts; DataError if the package, the generator or a setting is missing."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise DataError(
            f"task 'reasoning_gym' needs the package reasoning-gym; {suggest_install('tasks')}"
        )
    for name in _SET_BY_RECIPE.keys() & config.config.keys():
        raise DataError(
            f"task.config: {name} is not set here but by {_SET_BY_RECIPE[name]}; leave it out"
        )
    context.packages.append("reasoning-gym")
    task = ReasoningGym(config, context)
    left_out = config.train_size - len(task.train_prompts())
    if left_out == config.train_size:
        raise DataError(
            f"task.generator: all {config.train_size} training prompts of {config.generator!r} are "
            "also held out; lower task.heldout_size, or widen task.config so that there are more "
            "questions"
        )
    if left_out:
        log.info(
            f"{left_out} of {config.train_size} generated training prompts left out: "
            "repeated or held out"
        )
    return task


def _serialize(settings: dict[str, Any]) -> str:
    try:
        return json.dumps(settings)
    except TypeError as error:
        raise DataError(
            f"task.config: {error}; write numbers, texts, lists and mappings only"
        ) from error
