"""Compute an expression with a calculator: the built-in task with a tool, without a download.

The expression `37*48` is more than a tiny model can do by itself. It calls the tool `calc` and
copies the result. The task knows the right turns, so the teacher `expert` can teach it without a
model. Calls have the shortest form, `[calc(x="37*48")]`.
"""

import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from string import printable
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from practicum.core.randomness import seed_of
from practicum.ports import (
    Task,
    TaskConfig,
    TaskContext,
    ToolSession,
)
from practicum.ports.tasks import ToolProblem
from practicum.rows import PromptSet
from practicum.rows.answered import Tags, count_tagged, find_tagged, keep_answer
from practicum.types import Message, Prompt, Rollout, ToolSchema, ToolUse

OPERATORS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}
LONGEST_NUMBER = 9
"""The most digits of a number in a call, so that no call takes long."""

_EXPRESSION = re.compile(rf"(\d{{1,{LONGEST_NUMBER}}})([-+*])(\d{{1,{LONGEST_NUMBER}}})")

SCHEMA = ToolSchema(
    "calc",
    "Work out a+b, a-b or a*b.",
    {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
)


class Config(TaskConfig):
    """The expressions: two numbers of `digits` digits each."""

    offers_tools: ClassVar[bool] = True
    type: Literal["calculator"] = "calculator"
    digits: int = Field(default=2, ge=1, le=4, description="digits of each number")
    operators: str = Field(
        default="+-*", pattern=r"^[-+*]+$", description="some of + - *, each once"
    )
    tags: Tags | None = Field(
        default=None,
        description='texts before and after an answer, as `["<", ">"]`; the reward reads the text '
        "between the last two, or the whole turn if there are no tags",
    )
    sloppy: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="with `tags`: share of the expert's answers that lack them or are stated twice, "
        "half each",
    )
    turns: int = Field(default=4, ge=1, description="turns with calls after which it ends")
    bad_calls: int = Field(
        default=2, ge=1, description="calls without a result after which it ends"
    )
    train_size: int = Field(default=512, ge=1, description="expressions to train on")
    heldout_size: int = Field(default=64, ge=0, description="other expressions, to evaluate on")
    seed: int | None = Field(
        default=None, ge=0, description="seed of the expressions; none: the run's seed"
    )

    @model_validator(mode="after")
    def _check_sizes(self) -> "Config":
        if self.sloppy and self.tags is None:
            raise ValueError('sloppy is about the form of answers; write tags too, as ["<", ">"]')
        if len(set(self.operators)) < len(self.operators):
            raise ValueError(f"operators {self.operators!r} repeats one; write each once")
        count = self.train_size + self.heldout_size
        available = len(self.operators) * (9 * 10 ** (self.digits - 1)) ** 2
        if count > available:
            raise ValueError(
                f"train_size and heldout_size ask for {count} expressions, but there are only "
                f"{available}; raise digits, or lower the sizes"
            )
        return self


def compute(expression: str) -> int | None:
    """Return the value of an expression of two numbers, or None for any other text."""
    match = _EXPRESSION.fullmatch(expression)
    if match is None:
        return None
    first, sign, second = match.groups()
    return OPERATORS[sign](int(first), int(second))


@dataclass(frozen=True, slots=True)
class Calculator(ToolSession):
    """The tool `calc` of every conversation; see `practicum.ports.Toolbox`."""

    turns: int
    bad_calls: int

    @property
    def use(self) -> ToolUse:
        """The schema of the tool."""
        return ToolUse((SCHEMA,), "pythonic")

    def open(self, prompt: Prompt, seed: int) -> "Calculator":
        """Return the tool itself: it has no state."""
        return self

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the value of the expression; ToolProblem for any other text."""
        expression = arguments.get("x")
        value = compute(expression) if isinstance(expression, str) else None
        if value is None or len(arguments) > 1:
            raise ToolProblem("invalid", "x is no a+b")
        return str(value)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


@dataclass(frozen=True)
class Expressions(PromptSet):
    """Expressions with a calculator, and an expert that uses it."""

    calculator: Calculator = Calculator(4, 2)
    tags: Tags | None = None
    sloppy: float = 0.0

    @property
    def toolbox(self) -> Calculator:
        """The calculator."""
        return self.calculator

    @property
    def letters(self) -> str:
        """All printable ASCII letters: an observation may quote the model's text."""
        return printable.strip() + " "

    def reward(self, rollout: Rollout) -> float | None:
        """Return 1 if the last turn states the value, in any form, else 0."""
        answer = keep_answer(rollout)
        stated = [] if self.tags is None else find_tagged(answer.answer, self.tags)
        if stated:
            answer = replace(answer, text=stated[-1], opens_thoughts=False)
        return PromptSet.reward(self, answer)

    def count_answers(self, rollout: Rollout) -> int | None:
        """Return how often the answer is stated between tags; None without tags."""
        return count_tagged(rollout, self.tags)

    def expert(self, prompt: Prompt, turns: Sequence[str]) -> Mapping[str, float]:
        """Return the right turns: first the call, then the value, in its form or a sloppy one."""
        if not turns:
            return {write_call(prompt.messages[-1].content): 1.0}
        value, (before, after) = str(prompt.answer), self.tags or ("", "")
        clean = f"{before}{value}{after}"
        if not self.sloppy:
            return {clean: 1.0}
        return {clean: 1 - self.sloppy, value: self.sloppy / 2, 2 * clean: self.sloppy / 2}


def write_call(expression: str) -> str:
    """Return the call that computes an expression."""
    return f'[{SCHEMA.name}(x="{expression}")]'


def build(config: Config, context: TaskContext) -> Task:
    """Draw distinct expressions, the held-out ones first: they do not depend on `train_size`."""
    seed = context.seed if config.seed is None else config.seed
    draw = random.Random(seed_of(seed, "calculator"))
    low = 10 ** (config.digits - 1)
    texts: dict[str, None] = {}
    while len(texts) < config.heldout_size + config.train_size:
        first, second = (draw.randrange(low, 10 * low) for _ in range(2))
        texts[f"{first}{draw.choice(config.operators)}{second}"] = None
    prompts = [Prompt(text, (Message("user", text),), answer=str(compute(text))) for text in texts]
    return Expressions(
        train=prompts[config.heldout_size :],
        heldout=prompts[: config.heldout_size],
        calculator=Calculator(config.turns, config.bad_calls),
        tags=config.tags,
        sloppy=config.sloppy,
    )
