"""Gymnasium's FrozenLake as text: cross a lake with holes, turn by turn (2407.17032).

`P` is the player, `.` ice, `O` a hole and `G` the goal. A hole ends the game. On slippery ice an
action moves in its direction or to either side of it, with probability 1/3 each.
"""

import random
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from practicum.core.randomness import seed_of
from practicum.methods.games.boards import MOVES, BoardConfig, Game, Square, build_games
from practicum.ports import Task, TaskContext

SAFE = 0.8
"""The share of squares without a hole, as in Gymnasium's random maps."""

RULES = "P is you. Go to G over the ice (.) and around the holes (O)."

DIRECTIONS = tuple(MOVES)
"""The actions in Gymnasium's order, in which neighbors of an action are its sideways directions."""


class Config(BoardConfig):
    """The size of a lake and its ice."""

    type: Literal["frozen_lake"] = "frozen_lake"
    size: int = Field(default=4, ge=2, le=8, description="rows and columns of a lake")
    slippery: bool = Field(
        default=False, description="an action may slip to either side, probability 1/3 each"
    )


@dataclass(frozen=True, slots=True)
class Lake:
    """A lake: its rows of `S`, `F`, `H` and `G`, and the sideways slip of each turn."""

    rows: tuple[str, ...]
    drifts: tuple[int, ...]

    @property
    def start(self) -> Square:
        """Return the first square."""
        return 0, 0

    @property
    def varies(self) -> bool:
        """Return True on slippery ice."""
        return any(self.drifts)

    def move(self, state: Square, action: str, turn: int) -> Square:
        """Return the square after an action; the player cannot leave the board."""
        place = (DIRECTIONS.index(action) + self.drifts[turn]) % len(DIRECTIONS)
        down, right = MOVES[DIRECTIONS[place]]
        last = len(self.rows) - 1
        return min(max(state[0] + down, 0), last), min(max(state[1] + right, 0), last)

    def is_won(self, state: Square) -> bool:
        """Return True at the goal."""
        return self._read(state) == "G"

    def is_lost(self, state: Square) -> bool:
        """Return True in a hole."""
        return self._read(state) == "H"

    def draw(self, state: Square) -> str:
        """Return the lake with the player on it."""
        marks = {"S": ".", "F": ".", "H": "O", "G": "G"}
        squares = [[marks[square] for square in row] for row in self.rows]
        squares[state[0]][state[1]] = "P"
        return "\n".join("".join(row) for row in squares)

    def _read(self, state: Square) -> str:
        return self.rows[state[0]][state[1]]


def draw_rows(size: int, draw: random.Random) -> tuple[str, ...]:
    """Return a random map with a way from the first square to the last."""
    while True:
        squares = [["F" if draw.random() < SAFE else "H" for _ in range(size)] for _ in range(size)]
        squares[0][0], squares[-1][-1] = "S", "G"
        rows = tuple("".join(row) for row in squares)
        # Without slips, the search of a game finds a way if one exists.
        calm = Game(Lake(rows, (0,) * size * size), size * size)
        if calm.can_win():
            return rows


def build(config: Config, context: TaskContext) -> Task:
    """Draw the lakes."""

    def draw_lake(seed: int, name: str) -> Lake:
        draw = random.Random(seed_of(seed, "frozen_lake", name))
        rows = draw_rows(config.size, draw)
        drifts = [draw.choice((-1, 0, 1)) for _ in range(config.turns)]
        drifts = tuple(drifts if config.slippery else [0] * config.turns)
        return Lake(rows, drifts)

    return build_games(config, context, draw_lake, RULES, marks="P.OG")
