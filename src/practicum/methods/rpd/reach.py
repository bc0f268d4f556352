"""A camera above a table: move it over the square whose colour the instruction names.

The frame shows what is around the camera, so the right action is the direction to the square, at
most `STRIDE` per turn and axis. Gymnasium's id is `practicum.methods.rpd.reach:practicum/Reach-v0`.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "white": (255,) * 3}
"""The colours of the squares."""

STRIDE = 0.5
"""The longest move along an axis in one turn; the table reaches from -1 to 1."""

NEAR = 0.25
"""The distance along each axis at which the camera is over the square."""

SIDE, HALF = 32, 3
"""The pixels of a frame's side, and of a square from its middle to its edge."""


class Reach(gymnasium.Env[Any, Any]):
    """Squares on a table, `objects` in number; the reward is 1 once the camera is over the named one.

    With `noise` each action is moved by a normal number of this size. A `blank` frame is black. The
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
        names = [str(name) for name in self.np_random.permutation(list(COLOURS))]
        self._squares = {}
        for name in names[: self._objects]:
            while True:
                place = self.np_random.uniform(-0.9, 0.9, 2)
                others = [np.abs(place - other).max() for other in self._squares.values()]
                if np.abs(place).max() > NEAR and min(others, default=1.0) > NEAR:
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
        frame = np.zeros((SIDE, SIDE, 3), np.uint8)
        squares = {} if self._blank else self._squares
        for name, place in squares.items():
            middle = np.clip((place + 1) / 2 * SIDE, HALF, SIDE - HALF).round().astype(int)
            (left, top), (right, bottom) = middle - HALF, middle + HALF
            frame[top:bottom, left:right] = COLOURS[name]
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
