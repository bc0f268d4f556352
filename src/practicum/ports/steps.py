"""The port of tasks that can check an answer step by step, before it is finished."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from practicum.types import Prompt


@runtime_checkable
class ChecksSteps(Protocol):
    """A task that knows which steps of an answer hold, for example because their code runs."""

    def count_valid_steps(self, prompt: Prompt, steps: Sequence[str]) -> int:
        """Return how many steps hold, from the first on; each is given all steps before it."""
        ...
