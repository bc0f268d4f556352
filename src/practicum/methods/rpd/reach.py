"""A camera above a table: move it over the square whose colour the instruction names.

The frame shows what is around the camera, so the right action is the direction to the square, at
most `STRIDE` per turn and axis. Gymnasium's id is `practicum.methods.rpd.reach:practicum/Reach-v0`.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

COLOURS = {"red": (255, 0, 0), "blue": (0, 0, 255)}
"""The colours of the squares."""

TABLE = (122, 116, 104)
"""The colour of the table, the mean of the pictures that models of pictures are made for."""

STRIDE = 0.5
"""The longest move along an axis in one turn; the table reaches from -1 to 1."""

NEAR = 0.25
"""The distance along each axis at which the camera is over the square."""

SIDE, HALF = 32, 4
"""The pixels of a frame's side, and of a square from its middle to its edge."""


class Reach(gymnasium.Env[Any, Any]):
    """At most `objects` squares on a table; the reward is 1 once the camera is over the named one.

    With `noise` each action is moved by a normal number of this size. A `blank` frame shows no square. The
    observation is the place of the named square as the camera sees it, in strides.
    """

    def __init__(
        self,
        objects: int = 2,
        noise: float = 0.0,
        blank: bool = False,
        render_mode: str | None = "rgb_array",
    ) -> None:
        self.metadata = {"render_modes": ["rgb_array"]}
        self.render_mode = render_mode
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.observation_space = spaces.Box(-4.0, 4.0, (2,), np.float32)
        self._noise, self._blank, self._objects = noise, blank, objects
        self._squares: dict[str, np.ndarray] = {}
        self._goal = "red"

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Draw the squares at least `NEAR` apart, and the goal among them."""
        super().reset(seed=seed)
        count = int(self.np_random.integers(1, self._objects + 1))
        names = [str(name) for name in self.np_random.permutation(list(COLOURS))[:count]]
        self._squares = {}
        for name in names:
            while True:
                place = self.np_random.uniform(-0.9, 0.9, 2)
                # The camera, and the squares so far.
                middles = [np.zeros(2), *self._squares.values()]
                if min(np.abs(place - square).max() for square in middles) > NEAR:
                    break
            self._squares[name] = place
        self._goal = names[0]
        return self._observe(), {"instruction": self._goal}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move the camera."""
        move = STRIDE * np.clip(action, -1.0, 1.0) + self._noise * self.np_random.normal(size=2)
        self._squares = {name: place - move for name, place in self._squares.items()}
        is_there = bool(np.abs(self._squares[self._goal]).max() <= NEAR)
        return self._observe(), float(is_there), is_there, False, {}

    def render(self) -> Any:
        """Return the frame [SIDE, SIDE, 3]; a square outside is drawn at the edge."""
        frame = np.full((SIDE, SIDE, 3), TABLE, np.uint8)
        # In the order of the names: the order in which they were drawn tells the goal.
        squares = {} if self._blank else self._squares
        for name, place in sorted(squares.items(), key=lambda item: item[0]):
            middle = np.clip((place + 1) / 2 * SIDE, HALF, SIDE - HALF).round().astype(int)
            (x0, y0), (x1, y1) = middle - HALF, middle + HALF
            frame[y0:y1, x0:x1] = COLOURS[name]
        return frame

    def find_best(self) -> Any:
        """Return the action that brings the camera nearest to the square."""
        return np.clip(self._squares[self._goal] / STRIDE, -1.0, 1.0)

    def _observe(self) -> Any:
        return np.clip(self._squares[self._goal] / STRIDE, -4.0, 4.0).astype(np.float32)


def act(env: Reach) -> Any:
    """Return the best action: the expert of a task."""
    return env.find_best()


gymnasium.register("practicum/Reach-v0", f"{__name__}:Reach")
