"""Any generator of reasoning-gym by name, scored by its own verifier.

Both run in a sandboxed process of their own with a deadline, because a verifier may evaluate what a model wrote.
"""

import importlib.util
import json
import logging
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from practicum.core.calls import did_you_mean
from practicum.core.randomness import seed_of
from practicum.errors import DataError
from practicum.ports import Task
from practicum.sandbox import NoLine
from practicum.tasks import TaskContext
from practicum.tasks._deadline import VerifierFailed, VerifierProcess, Walls
from practicum.types import Message, Prompt, Rollout

log = logging.getLogger(__name__)

ITEM_SECONDS = 60.0
_OWN = {"seed": "the recipe's seed", "size": "task.train_size and task.heldout_size"}


class Config(BaseModel):
    """Which generator, with which of its settings, and how many prompts."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["reasoning_gym"] = "reasoning_gym"
    generator: str = Field(description="its name, for example products or chain_sum")
    config: dict[str, Any] = Field(default={}, description="the generator's own settings")
    sandbox: Walls = Field(
        default="require",
        description="whether it is refused where a wall around it is missing, or runs without it",
    )
    train_size: int = Field(
        default=512, ge=1, description="items drawn to train on; repeated ones are left out"
    )
    heldout_size: int = Field(
        default=64, ge=0, description="items drawn, from another seed, to evaluate on"
    )


class ReasoningGym:
    """Prompts drawn from one generator; see `practicum.ports.Task`."""

    def __init__(self, config: Config, context: TaskContext) -> None:
        seed = context.seed
        sizes = {"train": config.train_size, "heldout": config.heldout_size}
        seeds = {split: seed_of(seed, "reasoning_gym", split) % 2**31 for split in sizes}
        settings = {
            "generator": config.generator,
            "config": config.config,
            "seeds": seeds,
            "sizes": sizes,
        }
        self._generator = config.generator
        self._process = VerifierProcess(
            "practicum.tasks._reasoning_gym", _json(settings), sandbox=config.sandbox
        )
        remark = self._process.check_walls()
        if remark is not None:
            log.info(remark)
        known = self._process.ask({}, ITEM_SECONDS)
        if config.generator not in known:
            raise DataError(
                f"task.generator: no generator named {config.generator!r}; {did_you_mean(config.generator, known)}"
            )
        self._heldout = self._prompts("heldout", config.heldout_size, frozenset())
        held = frozenset(prompt.messages for prompt in self._heldout)
        self._train = self._prompts("train", config.train_size, held)
        self._check_verifier()

    def train_prompts(self) -> Sequence[Prompt]:
        """The prompts to train on; those that are also held out are left out."""
        return self._train

    def heldout_prompts(self) -> Sequence[Prompt]:
        """Prompts from another seed."""
        return self._heldout

    def reward(self, rollout: Rollout) -> float:
        """Return the generator's own score of the whole reply, but for spaces around it."""
        return self._process.call(self._request(rollout.prompt, rollout.text))

    def _request(self, prompt: Prompt, reply: str) -> dict[str, Any]:
        split, _, number = prompt.id.rpartition("-")
        return {"split": split, "number": int(number), "reply": reply.strip()}

    def _check_verifier(self) -> None:
        """Raise DataError where the generator's verifier fails on the generator's own answer."""
        for prompt in self._train[:1]:
            if prompt.answer is not None:
                request = self._request(prompt, prompt.answer)
                try:
                    self._process.ask(request, ITEM_SECONDS)
                except (VerifierFailed, NoLine) as error:
                    raise DataError(
                        f"task.generator: the verifier of {self._generator!r} fails on the generator's own answer ({error}); "
                        "take another generator, or other settings"
                    ) from error

    def _prompts(
        self, split: str, size: int, excluded: frozenset[tuple[Message, ...]]
    ) -> list[Prompt]:
        prompts: dict[tuple[Message, ...], Prompt] = {}
        for number in range(size):
            item = self._item(split, number)
            messages = (Message("user", item["question"]),)
            if messages not in excluded:
                prompt = Prompt(
                    f"{split}-{number}", messages, item["answer"], domain=self._generator
                )
                prompts.setdefault(messages, prompt)
        return list(prompts.values())

    def _item(self, split: str, number: int) -> dict[str, Any]:
        try:
            return self._process.ask({"split": split, "number": number}, ITEM_SECONDS)
        except (VerifierFailed, NoLine) as error:
            raise DataError(
                f"task.config: the generator {self._generator!r} cannot make item {number} ({error}); "
                "change its settings"
            ) from error


def build(config: Config, context: TaskContext) -> Task:
    """Generate the prompts; DataError where the package, the generator or its settings are not there."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise DataError(
            "task 'reasoning_gym' needs the package reasoning-gym; run: pip install 'practicum[tasks]'"
        )
    for name in _OWN.keys() & config.config.keys():
        raise DataError(f"task.config: {name} is not set here but by {_OWN[name]}; leave it out")
    context.packages.append("reasoning-gym")
    task = ReasoningGym(config, context)
    left_out = config.train_size - len(task.train_prompts())
    if left_out == config.train_size:
        raise DataError(
            f"task.generator: all {config.train_size} training prompts of {config.generator!r} are also held out; lower "
            "task.heldout_size, or widen task.config so that there are more questions"
        )
    if left_out:
        log.info(
            f"{left_out} of {config.train_size} generated training prompts left out: repeated or held out"
        )
    return task


def _json(settings: dict[str, Any]) -> str:
    try:
        return json.dumps(settings)
    except TypeError as error:
        raise DataError(
            f"task.config: {error}; write numbers, texts, lists and mappings only"
        ) from error
