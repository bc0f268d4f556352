"""The usual task: prompts with an answer each, and a function that compares a reply with it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from practicum.tasks._verifiers import compare_exactly
from practicum.types import Prompt, Rollout


@dataclass(frozen=True)
class PromptSet:
    """Prompts to train on and held-out prompts; see `practicum.ports.Task`.

    `verify(reply, answer)` returns the reward of a reply, 0 to 1. `grade(reply, prompt)`, if there
    is one, takes its place: it knows the whole prompt, and also grades prompts without an answer.
    """

    train: Sequence[Prompt]
    heldout: Sequence[Prompt]
    verify: Callable[[str, str], float] = compare_exactly
    grade: Callable[[str, Prompt], float | None] | None = None

    def train_prompts(self) -> Sequence[Prompt]:
        """Return the prompts to train on."""
        return self.train

    def heldout_prompts(self) -> Sequence[Prompt]:
        """Return the held-out prompts."""
        return self.heldout

    def reward(self, rollout: Rollout) -> float | None:
        """Return the verifier's reward of the text, or None if it compares with a missing answer."""
        if self.grade is not None:
            return self.grade(rollout.text, rollout.prompt)
        answer = rollout.prompt.answer
        return None if answer is None else self.verify(rollout.text, answer)
