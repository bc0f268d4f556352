"""Sokoban on small boards as text: push all boxes onto their places, turn by turn.

`@` is the player (`+` on a place), `$` a box (`*` on a place), `.` a place, `#` a wall and `_` the
floor. The player can push a box but not pull it. Boards are generated backwards, by pulling the
boxes from their places, so that every board can be solved.
"""

import random
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, model_validator

from practicum.core.randomness import seed_of
from practicum.methods.games.boards import MOVES, BoardConfig, Game, Square, build_games
from practicum.ports import Task, TaskContext

RULES = "@ is you. Push each box ($) onto a place (.). Walls are #."

PULLS = 40
"""The number of random backward moves that generate a board from its solved state."""

State = tuple[Square, frozenset[Square]]
"""The squares of the player and of the boxes."""


class Config(BoardConfig):
    """The size of a board, its boxes and its walls."""

    type: Literal["sokoban"] = "sokoban"
    size: int = Field(default=4, ge=3, le=7, description="rows and columns within the outer wall")
    boxes: int = Field(default=1, ge=1, le=3, description="number of boxes and of places")
    walls: float = Field(default=0.1, ge=0, le=0.4, description="share of squares with a wall")

    @model_validator(mode="after")
    def _check_turns(self) -> "Config":
        # Each box needs at least one push; a board that needs more than `turns` is drawn again.
        if self.turns < self.boxes:
            raise ValueError(f"{self.boxes} boxes need at least as many turns; raise turns")
        return self


@dataclass(frozen=True, slots=True)
class Warehouse:
    """A board: its size, its walls, the places for boxes, and its initial state."""

    size: int
    walls: frozenset[Square]
    places: frozenset[Square]
    start: State

    @property
    def varies(self) -> bool:
        """Return False: every turn has the same rules."""
        return False

    def move(self, state: State, action: str, turn: int) -> State:
        """Return the state after a step or a push; a blocked action moves nothing."""
        player, boxes = state
        ahead, behind = (_shift(player, action, steps) for steps in (1, 2))
        if self.is_wall(ahead):
            return state
        if ahead not in boxes:
            return ahead, boxes
        if self.is_wall(behind) or behind in boxes:
            return state
        return ahead, boxes - {ahead} | {behind}

    def pull(self, state: State, action: str) -> State:
        """Return the state after a step that pulls the box behind the player, if any."""
        player, boxes = state
        ahead, box = (_shift(player, action, steps) for steps in (1, -1))
        if self.is_wall(ahead) or ahead in boxes:
            return state
        return ahead, boxes - {box} | {player} if box in boxes else boxes

    def is_wall(self, square: Square) -> bool:
        """Return True for a wall within the board and for the outer wall."""
        return square in self.walls or not all(0 <= place < self.size for place in square)

    def is_won(self, state: State) -> bool:
        """Return True if every box is in its place."""
        return state[1] == self.places

    def is_lost(self, state: State) -> bool:
        """Return False: the game continues even if a box is stuck in a corner."""
        return False

    def draw(self, state: State) -> str:
        """Return the board within its outer wall."""
        edge = range(-1, self.size + 1)
        return "\n".join("".join(self._mark(state, (row, place)) for place in edge) for row in edge)

    def _mark(self, state: State, square: Square) -> str:
        if self.is_wall(square):
            return "#"
        is_place = square in self.places
        if square == state[0]:
            return "+" if is_place else "@"
        if square in state[1]:
            return "*" if is_place else "$"
        return "." if is_place else "_"


def _shift(square: Square, action: str, steps: int) -> Square:
    down, right = MOVES[action]
    return square[0] + steps * down, square[1] + steps * right


def draw_warehouse(config: Config, draw: random.Random) -> Warehouse:
    """Return an unsolved board that can be solved within its turns."""
    squares = [(row, place) for row in range(config.size) for place in range(config.size)]
    while True:
        free = [square for square in squares if draw.random() >= config.walls]
        if len(free) < config.boxes + 2:
            continue
        player, *boxes = draw.sample(free, config.boxes + 1)
        walls, places = frozenset(squares) - frozenset(free), frozenset(boxes)
        state: State = (player, places)
        warehouse = Warehouse(config.size, walls, places, state)
        for _ in range(PULLS):
            state = warehouse.pull(state, draw.choice(tuple(MOVES)))
        warehouse = Warehouse(config.size, walls, places, state)
        if not warehouse.is_won(state) and Game(warehouse, config.turns).can_win():
            return warehouse


def build(config: Config, context: TaskContext) -> Task:
    """Draw the boards."""

    def draw_board(seed: int, name: str) -> Warehouse:
        return draw_warehouse(config, random.Random(seed_of(seed, "sokoban", name)))

    return build_games(config, context, draw_board, RULES, marks="@+$*.#_")
