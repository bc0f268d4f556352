"""Episodes that need no state of their own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from practicum.ports import Observation
from practicum.types import Message


@dataclass(slots=True)
class FunctionEpisode:
    """An episode whose answer is a function of the turns so far: the text of the next turn, or None at the end.

    See `practicum.ports.Episode`.
    """

    answer: Callable[[Sequence[str]], str | None]
    turns: list[str] = field(default_factory=list)

    def step(self, turn: str) -> Observation:
        """Return what the function says after this turn."""
        self.turns.append(turn)
        text = self.answer(tuple(self.turns))
        return Observation(None if text is None else Message("user", text))

    def close(self) -> None:
        """There is nothing to let go of."""
