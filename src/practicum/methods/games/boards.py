"""Games on a board of squares, turn by turn: who moves, what is seen, and the shortest way to win.

The board is text, a direction is the action, and everything random follows from the prompt, so that
all completions of a prompt face the same board. The task's expert looks for the shortest way, and
knows all that the board hides.
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
"""The actions, and by how many rows and columns they go."""

Square = tuple[int, int]
"""A row and a column."""

S = TypeVar("S", bound=Hashable)
"""A state of a game: all that moves."""


class BoardConfig(TaskConfig):
    """The turns of a game, its expert, and the number of games."""

    turns: int = Field(default=12, ge=1, le=100, description="turns within which to win")
    rules: bool = Field(default=True, description="say the rules before the first board")
    letters: bool = Field(
        default=False, description="a direction is its first letter, one token in many vocabularies"
    )
    slip: float = Field(
        default=0.04, ge=0, le=1, description="how often the expert goes anywhere, the best way too"
    )
    train_size: int = Field(default=256, ge=1, description="boards to train on")
    heldout_size: int = Field(default=64, ge=0, description="other boards, to evaluate on")
    seed: int | None = Field(default=None, description="of the boards; none: the run's")


class Board(Protocol[S]):
    """One game: its beginning and its rules."""

    @property
    def start(self) -> S:
        """The state before the first turn."""
        ...

    @property
    def varies(self) -> bool:
        """Return True if one action may do different things in different turns."""
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
        """Return the board as text, a row a line."""
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
    """A board, the turns within which it is to be won, and how its directions are written."""

    board: Board[S]
    turns: int
    directions: Directions = WORDS

    def play(self, replies: Sequence[str]) -> S:
        """Return the state after these turns; what names no direction moves nothing."""
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
        """Return what is seen after these turns; None at the end."""
        state = self.play(replies)
        if self.has_ended(state) or len(replies) >= self.turns:
            return None
        hint = "" if self.directions.read(replies[-1]) else _write_hint(self.directions)
        return hint + self.board.draw(state)

    def can_win(self) -> bool:
        """Return True if there is a way to win within the turns."""
        return self._measure(self.board.start, 0) < float("inf")

    def find_best(self, replies: Sequence[str]) -> list[str]:
        """Return the actions that begin a shortest way to win; all of them if there is none."""
        state, turn = self.play(replies), len(replies)
        after = {action: self.board.move(state, action, turn) for action in MOVES}
        lengths = {action: self._measure(next_, turn + 1) for action, next_ in after.items()}
        least = min(lengths.values())
        return [action for action, length in lengths.items() if length == least]

    def _measure(self, state: S, turn: int) -> float:
        """Return the fewest actions from a state to a win within the turns that are left."""
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
                # The same square in another turn is another place where the ice slips anew.
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

    `rules` stand before the first board. `slip` is how often the expert goes anywhere.
    """

    games: Mapping[str, Game[Any]]
    heldout_size: int
    rules: str
    slip: float
    marks: str
    directions: Directions = WORDS

    @property
    def letters(self) -> str:
        """The letters of boards, directions, hints and rules."""
        words = "".join(self.directions.names) + _write_hint(self.directions)
        return "".join(sorted({*self.marks, *words, *self.rules}))

    def train_prompts(self) -> Sequence[Prompt]:
        """Return the games to train on, as their first board."""
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
        # Drawn from the prompt and not from `seed`: the rewards of a group differ by actions alone.
        return FunctionEpisode(self.games[prompt.id].answer)

    def expert(self, prompt: Prompt, turns: Sequence[str]) -> Mapping[str, float]:
        """Return the probability of each direction: the best ones, and any by the slips."""
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
    """Draw the games by seed and name, the held-out ones first; directions follow the rules."""
    directions = LETTERS if config.letters else WORDS
    *most, last = directions.names
    rules = f"{rules} Write {', '.join(most)} or {last}." if config.rules else ""
    seed = context.seed if config.seed is None else config.seed
    names = [f"heldout-{number}" for number in range(config.heldout_size)]
    names += [f"train-{number}" for number in range(config.train_size)]
    games = {name: Game(draw_board(seed, name), config.turns, directions) for name in names}
    return BoardTask(games, config.heldout_size, rules, config.slip, marks, directions)
