"""Turn-based games on a board of squares, with an expert that finds the shortest way to win.

The board is text, and a direction is an action. The prompt determines all random events, so that all
completions of a prompt face the same board. The task's expert searches for the shortest way, and
also knows the hidden state of the board.
"""

import re
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from pydantic import Field

from practicum.agents.episodes import FunctionEpisode
from practicum.ports import Task, TaskConfig, TaskContext
from practicum.types import Message, Prompt, Rollout

MOVES: Mapping[str, tuple[int, int]] = {
    "left": (0, -1),
    "down": (1, 0),
    "right": (0, 1),
    "up": (-1, 0),
}
"""The actions, each with its change of row and column."""

Square = tuple[int, int]
"""A row and a column."""

S = TypeVar("S", bound=Hashable)
"""The state of a game: the positions of all movable objects."""


class BoardConfig(TaskConfig):
    """The turns of a game, its expert, and the number of games."""

    turns: int = Field(default=12, ge=1, le=100, description="maximum number of turns to win")
    rules: bool = Field(default=True, description="show the rules before the first board")
    letters: bool = Field(
        default=False,
        description="write directions as first letters, one token in many vocabularies",
    )
    slip: float = Field(
        default=0.04, ge=0, le=1, description="probability of a random direction by the expert"
    )
    train_size: int = Field(default=256, ge=1, description="boards to train on")
    heldout_size: int = Field(default=64, ge=0, description="held-out boards for evaluation")
    seed: int | None = Field(default=None, description="seed of the boards; none: the run's seed")


class Board(Protocol[S]):
    """One game: its initial state and its rules."""

    @property
    def start(self) -> S:
        """The state before the first turn."""
        ...

    @property
    def varies(self) -> bool:
        """Return True if the effect of an action may differ between turns."""
        ...

    def move(self, state: S, action: str, turn: int) -> S:
        """Return the state after an action in a turn."""
        ...

    def is_won(self, state: S) -> bool:
        """Return True if the game is won."""
        ...

    def is_lost(self, state: S) -> bool:
        """Return True if the game has ended without a win."""
        ...

    def draw(self, state: S) -> str:
        """Return the board as text, one line per row."""
        ...


class Directions:
    """The written names of the directions: words, or their first letters."""

    def __init__(self, letters: bool) -> None:
        self.names = {name[0] if letters else name: name for name in MOVES}
        self._pattern = re.compile(rf"\b({'|'.join(self.names)})\b", re.IGNORECASE)

    def read(self, text: str) -> str | None:
        """Return the direction that a turn names last, or None."""
        named = self._pattern.findall(text)
        return self.names[named[-1].lower()] if named else None


WORDS, LETTERS = Directions(letters=False), Directions(letters=True)


@dataclass(frozen=True, slots=True)
class Game(Generic[S]):
    """A board, its maximum number of turns, and the written names of its directions."""

    board: Board[S]
    turns: int
    directions: Directions = WORDS

    def play(self, replies: Sequence[str]) -> S:
        """Return the state after these turns; a turn without a direction moves nothing."""
        state = self.board.start
        for turn, text in enumerate(replies):
            action = self.directions.read(text)
            if action is not None and not self.has_ended(state):
                state = self.board.move(state, action, turn)
        return state

    def has_ended(self, state: S) -> bool:
        """Return True if no further action changes anything."""
        return self.board.is_won(state) or self.board.is_lost(state)

    def answer(self, replies: Sequence[str]) -> str | None:
        """Return the visible board after these turns; None at the end."""
        state = self.play(replies)
        if self.has_ended(state) or len(replies) >= self.turns:
            return None
        return self.warn(replies) + self.board.draw(state)

    def warn(self, replies: Sequence[str]) -> str:
        """Return the warning about a last turn without a direction; empty after a direction."""
        return "" if self.directions.read(replies[-1]) else _write_hint(self.directions)

    def can_win(self) -> bool:
        """Return True if there is a way to win within the turns."""
        return self._measure(self.board.start, 0) < float("inf")

    def find_best(self, replies: Sequence[str]) -> list[str]:
        """Return the first actions of all shortest ways to win; all actions if winning is impossible."""
        state, turn = self.play(replies), len(replies)
        after = {action: self.board.move(state, action, turn) for action in MOVES}
        lengths = {action: self._measure(next_, turn + 1) for action, next_ in after.items()}
        least = min(lengths.values())
        return [action for action, length in lengths.items() if length == least]

    def _measure(self, state: S, turn: int) -> float:
        """Return the fewest actions from a state to a win within the remaining turns."""
        waiting: deque[tuple[S, int]] = deque([(state, turn)])
        visited: set[Hashable] = set()
        while waiting:
            state, current = waiting.popleft()
            if self.board.is_won(state):
                return current - turn
            if self.board.is_lost(state) or current >= self.turns:
                continue
            for action in MOVES:
                following = self.board.move(state, action, current)
                # On a varying board, the same square in a different turn is a different place.
                place = (following, current + 1) if self.board.varies else following
                if place not in visited:
                    visited.add(place)
                    waiting.append((following, current + 1))
        return float("inf")


def _write_hint(directions: Directions) -> str:
    return f"no move: write {', '.join(directions.names)}\n"


@dataclass(frozen=True, slots=True)
class BoardTask(Task):
    """Games by the name of their prompt, and an expert that solves them.

    The text `rules` precedes the first board. `slip` is the probability that the expert chooses a
    random direction.
    """

    games: Mapping[str, Game[Any]]
    heldout_size: int
    rules: str
    slip: float
    marks: str
    directions: Directions = WORDS

    @property
    def letters(self) -> str:
        """The characters of boards, directions, hints and rules."""
        words = "".join(self.directions.names) + _write_hint(self.directions)
        return "".join(sorted({*self.marks, *words, *self.rules}))

    def train_prompts(self) -> Sequence[Prompt]:
        """Return a prompt with the first board for each training game."""
        return self._prompts()[self.heldout_size :]

    def heldout_prompts(self) -> Sequence[Prompt]:
        """Return the held-out games."""
        return self._prompts()[: self.heldout_size]

    def _prompts(self) -> list[Prompt]:
        opening = f"{self.rules}\n" if self.rules else ""
        return [
            Prompt(name, (Message("user", opening + game.board.draw(game.board.start)),))
            for name, game in self.games.items()
        ]

    def open(self, prompt: Prompt, seed: int) -> FunctionEpisode:
        """Begin a game; each answer shows the board."""
        # The prompt determines the game, not `seed`: rewards of a group differ only by actions.
        game = self.games[prompt.id]
        return FunctionEpisode(game.answer, warn=game.warn)

    def expert(self, prompt: Prompt, turns: Sequence[str]) -> Mapping[str, float]:
        """Return the expert's probability of each direction, including random slips."""
        best = self.games[prompt.id].find_best(turns)
        return {
            name: (1 - self.slip) * (action in best) / len(best) + self.slip / len(MOVES)
            for name, action in self.directions.names.items()
        }

    def reward(self, rollout: Rollout) -> float | None:
        """Return 1 for a game that was won, else 0."""
        game = self.games[rollout.prompt.id]
        return float(game.board.is_won(game.play(rollout.replies[: game.turns])))


def build_games(
    config: BoardConfig,
    context: TaskContext,
    draw_board: Callable[[int, str], Board[Any]],
    rules: str,
    marks: str,
) -> BoardTask:
    """Draw the games by seed and name, held-out games first, and append directions to the rules."""
    directions = LETTERS if config.letters else WORDS
    *most, last = directions.names
    rules = f"{rules} Write {', '.join(most)} or {last}." if config.rules else ""
    seed = context.seed if config.seed is None else config.seed
    names = [f"heldout-{number}" for number in range(config.heldout_size)]
    names += [f"train-{number}" for number in range(config.train_size)]
    games = {name: Game(draw_board(seed, name), config.turns, directions) for name in names}
    return BoardTask(games, config.heldout_size, rules, config.slip, marks, directions)
