"""Episodes without state other than their turns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from practicum.ports import (
    Episode,
    Observation,
)
from practicum.types import Message


@dataclass(slots=True)
class FunctionEpisode(Episode):
    """An episode that answers with a function of the turns so far; see `practicum.ports.Episode`.

    `answer` returns the text of the next turn, or None at the end. `reward` returns the reward of
    the last turn, and `warn` the beginning of the answer that is a warning and no observation.
    """

    answer: Callable[[Sequence[str]], str | None]
    reward: Callable[[Sequence[str]], float] | None = None
    warn: Callable[[Sequence[str]], str] | None = None
    turns: list[str] = field(default_factory=list)

    def step(self, turn: str) -> Observation:
        """Return the function's answer to the turns so far, including this one."""
        self.turns.append(turn)
        turns = tuple(self.turns)
        text, reward = self.answer(turns), None if self.reward is None else self.reward(turns)
        if text is None:
            return Observation(None, reward=reward)
        warning = "" if self.warn is None else self.warn(turns)
        return Observation(Message("user", text), reward=reward, warning=warning)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
