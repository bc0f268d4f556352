"""Provide the task `calculator` with a fault in its expert: it often evaluates the same expression again before it answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from practicum.ports import Task, TaskContext
from practicum.tasks import calculator
from practicum.types import Prompt


class Config(calculator.Config):
    """The probability that the expert calls again after a result."""

    type: Literal["benchmarks.bent_calculator"] = "benchmarks.bent_calculator"  # type: ignore[assignment]
    again: float = 0.8


@dataclass(frozen=True)
class RepeatedCalls(calculator.Expressions):
    """See `practicum.tasks.calculator.Expressions`."""

    again: float = 0.0

    def expert(self, prompt: Prompt, turns: Sequence[str]) -> Mapping[str, float]:
        """Return the call at first, and later the call and the value with their probabilities."""
        (call,) = super().expert(prompt, ())
        return {call: self.again, str(prompt.answer): 1.0 - self.again} if turns else {call: 1.0}


def build(config: Config, context: TaskContext) -> Task:
    """Build the expressions with the faulty expert."""
    task = calculator.build(config, context)
    assert isinstance(task, calculator.Expressions)
    return RepeatedCalls(task.train, task.heldout, calculator=task.toolbox, again=config.again)
