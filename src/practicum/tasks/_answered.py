"""The task that most tasks are: prompts with an answer each, and a way to compare a reply with it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from practicum.tasks._verifiers import exact
from practicum.types import Prompt, Rollout


@dataclass(frozen=True)
class PromptSet:
    """Prompts to train on and others held out; `verify(reply, answer)` says how right a reply is, 0 to 1.

    See `practicum.ports.Task`.
    """

    train: Sequence[Prompt]
    heldout: Sequence[Prompt]
    verify: Callable[[str, str], float] = exact

    def train_prompts(self) -> Sequence[Prompt]:
        """The prompts to train on."""
        return self.train

    def heldout_prompts(self) -> Sequence[Prompt]:
        """The prompts held out."""
        return self.heldout

    def reward(self, rollout: Rollout) -> float | None:
        """Return what the verifier says of the text, or None where the prompt has no answer."""
        answer = rollout.prompt.answer
        return None if answer is None else self.verify(rollout.text, answer)
