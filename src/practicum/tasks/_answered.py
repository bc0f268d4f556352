"""The usual task: prompts with an answer each, and a function that compares a reply with it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from practicum.tasks._verifiers import compare_exactly
from practicum.types import Prompt, Rollout


@dataclass(frozen=True)
class PromptSet:
    """Prompts to train on and held-out prompts; see `practicum.ports.Task`.

    `verify(reply, answer)` returns the reward of a reply, 0 to 1.
    """

    train: Sequence[Prompt]
    heldout: Sequence[Prompt]
    verify: Callable[[str, str], float] = compare_exactly

    def train_prompts(self) -> Sequence[Prompt]:
        """Return the prompts to train on."""
        return self.train

    def heldout_prompts(self) -> Sequence[Prompt]:
        """Return the held-out prompts."""
        return self.heldout

    def reward(self, rollout: Rollout) -> float | None:
        """Return the verifier's reward of the text, or None if the prompt has no answer."""
        answer = rollout.prompt.answer
        return None if answer is None else self.verify(rollout.text, answer)
