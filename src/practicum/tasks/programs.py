"""Evaluate an expression in lines of Python: a task with answers that are checked step by step.

A program evaluates the expression `3+4*2` from left to right, such as `a=3`, `a+=4`, `a*=2`. The
program is right if its last line assigns the value, 14; the other lines do not matter. Lines run in
order, and only in a sandboxed process. The privileged fields `parts` and `rephrased` have the
sub-questions, one per line, such as `3+4`, and another expression with the same value, `4+3*2`.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, model_validator

from practicum.core.randomness import seed_of
from practicum.ports import Task, TaskConfig, TaskContext
from practicum.rows import PromptSet
from practicum.sandbox.deadline import Canary, VerifierProcess, Walls
from practicum.types import Message, Prompt

MODULE = "practicum.grading.run_programs"
CANARY = Canary({"reply": "a=2\nb=a*3", "answer": "a=6"}, 1.0)
MAX_STEPS = 1 << 20
"""A bound on the number of lines, which the process returns as a score."""


class Config(TaskConfig):
    """The expressions: their numbers are digits, from `shortest` to `longest` of them."""

    type: Literal["programs"] = "programs"
    digits: str = Field(
        default="123456789", pattern=r"^[0-9]+$", description="the digits, each once"
    )
    operators: str = Field(
        default="+-*", pattern=r"^[-+*]+$", description="some of + - *, each once"
    )
    shortest: int = Field(default=3, ge=1, description="numbers of the shortest expression")
    longest: int = Field(default=4, ge=1, le=100, description="numbers of the longest expression")
    train_size: int = Field(default=512, ge=1, description="expressions to train on")
    heldout_size: int = Field(default=64, ge=0, description="other expressions, to evaluate on")
    seed: int | None = Field(
        default=None, ge=0, description="seed of the expressions; none: the run's seed"
    )
    sandbox: Walls = Field(
        default="require",
        description="`best_effort` runs the programs without the walls that this machine cannot "
        "put up",
    )

    @model_validator(mode="after")
    def _check_choices(self) -> "Config":
        for name, letters in (("digits", self.digits), ("operators", self.operators)):
            if len(set(letters)) < len(letters):
                raise ValueError(f"{name} {letters!r} repeats a character; write each once")
        if self.shortest > self.longest:
            raise ValueError(
                f"shortest is {self.shortest} and longest {self.longest}; shortest may not be "
                "greater"
            )
        count, available = self.train_size + self.heldout_size, self.count_expressions()
        if count > available:
            raise ValueError(
                f"train_size and heldout_size ask for {count} expressions, but there are only "
                f"{available}; raise longest, or lower the sizes"
            )
        return self

    def count_expressions(self) -> int:
        """Return the number of different expressions."""
        digits, operators = len(self.digits), len(self.operators)
        lengths = range(self.shortest, self.longest + 1)
        return sum(digits**length * operators ** (length - 1) for length in lengths)


@dataclass(frozen=True)
class Programs(PromptSet):
    """Expressions with programs as answers, which are checked line by line."""

    process: VerifierProcess | None = None

    def count_valid_steps(self, prompt: Prompt, steps: Sequence[str]) -> int:
        """Return how many lines run, from the first on."""
        assert self.process is not None, "it is opened with the task"
        return int(self.process.call({"lines": list(steps)}))


def build(config: Config, context: TaskContext) -> Task:
    """Draw distinct expressions, the held-out ones first: they do not depend on `train_size`."""
    draw = random.Random(seed_of(context.seed if config.seed is None else config.seed, "programs"))
    expressions: dict[str, None] = {}
    while len(expressions) < config.heldout_size + config.train_size:
        expressions[_draw_expression(draw, config)] = None
    prompts = [
        Prompt(
            text,
            (Message("user", text),),
            answer=write_program(text),
            privileged=list_other_questions(text),
        )
        for text in expressions
    ]
    process = VerifierProcess(
        MODULE, canary=CANARY, sandbox=config.sandbox, scores=(0.0, float(MAX_STEPS))
    )
    return Programs(
        train=prompts[config.heldout_size :],
        heldout=prompts[: config.heldout_size],
        verify=lambda reply, answer: process.call({"reply": reply, "answer": answer}),
        process=process,
    )


def _draw_expression(draw: random.Random, config: Config) -> str:
    text = draw.choice(config.digits)
    for _ in range(draw.randint(config.shortest, config.longest) - 1):
        text += draw.choice(config.operators) + draw.choice(config.digits)
    return text


def list_other_questions(expression: str) -> dict[str, str]:
    """Return the `parts` of an expression, from two numbers on, and the `rephrased` expression.

    The first two numbers are swapped, unless they are subtracted or are the same.
    """
    fields = {"parts": "\n".join(expression[:end] for end in range(3, len(expression), 2))}
    if expression[1:2] in ("+", "*") and expression[0] != expression[2]:
        fields["rephrased"] = expression[2::-1] + expression[3:]
    return {name: text for name, text in fields.items() if text}


def write_program(expression: str) -> str:
    """Return the program that evaluates an expression from left to right."""
    steps = zip(expression[1::2], expression[2::2], strict=True)
    return "\n".join([f"a={expression[0]}", *(f"a{sign}={digit}" for sign, digit in steps)])
