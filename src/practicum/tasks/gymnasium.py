"""A Gymnasium environment as a conversation: each observation is a turn, and each reply an action.

An action of a `Discrete` space is a letter. One of a `Box` has a token for each dimension, one of
`bins` equal parts of its range, as vision-language-action models write it.
"""

import io
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, Literal

import numpy as np
from pydantic import Field, JsonValue, model_validator

from practicum.core.randomness import seed_of
from practicum.errors import DataError, suggest_install
from practicum.foreign import is_external, load_object
from practicum.pictures import IMAGE, encode_bytes, hide_places
from practicum.ports import Episode, Observation, Task, TaskConfig, TaskContext
from practicum.text.safe import excerpt
from practicum.types import Message, Prompt, Rollout

BINS = "".join(map(chr, range(0x2800, 0x2900)))
"""The characters of the bins: the 256 Braille patterns, which are consecutive."""

LETTERS = "abcdefghijklmnopqrstuvwxyz"
"""The characters of discrete actions."""

NO_ACTION = "no action. "
"""The beginning of the observation after a reply that is no action, which changes nothing."""

NUMBERS = "0123456789+-. naif"
"""The characters of a state."""

SLIPS = 8
"""The number of random actions among which the expert's slips choose at a state."""


class Config(TaskConfig):
    """The environment, the student's view of it, and the number of episodes."""

    type: Literal["gymnasium"] = "gymnasium"
    env: str = Field(
        min_length=1,
        description="its id, as CartPole-v1; after a colon if a module registers it, as my_envs:Reach-v0",
    )
    kwargs: dict[str, JsonValue] = Field(default={}, description="arguments of gymnasium.make")
    view: Literal["state", "frame"] = Field(
        default="state",
        description="what a turn shows: the observation's numbers, or a picture: the observation itself "
        "if it is one, else the rendered frame",
    )
    digits: int = Field(default=2, ge=0, le=6, description="decimals of a state's numbers")
    bins: int = Field(
        default=256, ge=2, le=len(BINS), description="parts of the range of a continuous action"
    )
    instruction: str | None = Field(
        default=None,
        description="text before the first observation; none: `instruction` of the info of a reset",
    )
    turns: int = Field(default=16, ge=1, le=1000, description="most turns of an episode")
    expert: str | None = Field(
        default=None,
        description="function `package.module:name` of the unwrapped environment that returns its best "
        "action, for the teacher `expert` and for `pretrain`",
    )
    slip: float = Field(
        default=0.0, ge=0, lt=1, description="probability of a random action by the expert"
    )
    reward: Literal["last", "sum"] = Field(
        default="sum", description="an episode's reward: of its last turn, or of all turns"
    )
    reward_range: tuple[float, float] = Field(
        default=(0.0, 1.0),
        description="smallest and largest reward of an episode, mapped to 0 and 1",
    )
    train_size: int = Field(default=256, ge=1, description="episodes to train on")
    heldout_size: int = Field(default=64, ge=0, description="other episodes, to evaluate on")
    seed: int | None = Field(default=None, description="seed of the episodes; none: the run's seed")

    @model_validator(mode="after")
    def _check(self) -> "Config":
        low, high = self.reward_range
        if not low < high:
            raise ValueError(f"reward_range: {low:g} is not below {high:g}; write [least, largest]")
        if self.expert is not None and not is_external(self.expert):
            raise ValueError(f"expert: {self.expert!r} is no name; write package.module:function")
        return self


@dataclass(frozen=True, slots=True)
class ActionSpace:
    """The actions of an environment as texts: `count` letters, or bins of each dimension's range.

    `space` is Gymnasium's; `letters` are the characters of a reply, and `length` is their number.
    """

    space: Any
    letters: str
    length: int
    is_discrete: bool

    def read(self, text: str) -> Any | None:
        """Return the action of a reply; None if it is none."""
        text = text.strip()
        if len(text) != self.length or any(letter not in self.letters for letter in text):
            return None
        places = [self.letters.index(letter) for letter in text]
        if self.is_discrete:
            return self.space.start + places[0]
        shares = [(2 * place + 1) / (2 * len(self.letters)) for place in places]
        low, high = self.space.low.astype(float).ravel(), self.space.high.astype(float).ravel()
        values = low + (high - low) * shares
        return values.reshape(self.space.shape).astype(self.space.dtype)

    def write(self, action: Any) -> str:
        """Return the text of an action: the nearest bin of each of its numbers."""
        if self.is_discrete:
            return self.letters[int(action) - int(self.space.start)]
        low, high = self.space.low.astype(float).ravel(), self.space.high.astype(float).ravel()
        values = np.asarray(action, dtype=float).ravel().tolist()
        count = len(self.letters)
        return "".join(
            self.letters[min(max(int((value - least) / (most - least) * count), 0), count - 1)]
            for value, least, most in zip(values, low, high, strict=True)
        )


def read_space(space: Any, bins: int) -> ActionSpace:
    """Return the actions of a space of Gymnasium; DataError if they cannot be written."""
    spaces = import_module("gymnasium.spaces")
    if isinstance(space, spaces.Discrete) and int(space.n) <= len(LETTERS):
        return ActionSpace(space, LETTERS[: int(space.n)], 1, is_discrete=True)
    if isinstance(space, spaces.Box) and space.is_bounded() and (space.high > space.low).all():
        return ActionSpace(space, BINS[:bins], int(space.low.size), is_discrete=False)
    raise DataError(
        f"task.env: actions of {excerpt(str(space))} cannot be written; wrap the environment so that it "
        f"has a Box with bounds, or a Discrete space of at most {len(LETTERS)} actions"
    )


class GymEpisode(Episode):
    """One episode; see `practicum.ports.Episode`."""

    def __init__(self, task: "Gymnasium", name: str) -> None:
        self.env = task.make()
        self._task = task
        self._turns = 0
        self.observation, _ = self.env.reset(seed=task.seeds[name])

    def step(self, turn: str) -> Observation:
        """Act, and show the next observation; a reply that is no action changes nothing."""
        self._turns += 1
        action, reward, is_over, warning = self._task.actions.read(turn), 0.0, False, NO_ACTION
        if action is not None:
            self.observation, reward, terminated, truncated, _ = self.env.step(action)
            is_over, warning = terminated or truncated, ""
        if is_over or self._turns == self._task.config.turns:
            return Observation(None, reward=float(reward))
        message = self._task.show(self, warning)
        return Observation(message, reward=float(reward), warning=warning)

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


class Gymnasium(Task):
    """The episodes of one environment, each from its own seed.

    A prompt's episode begins with the same reset in all its conversations, so their rewards only
    differ by their actions.
    """

    def __init__(self, config: Config, make: Callable[[], Any], seed: int) -> None:
        self.config = config
        self.make = make
        self._act = None if config.expert is None else load_object(config.expert)
        self.label = lru_cache(maxsize=4096)(self._label)
        sizes = {"heldout": config.heldout_size, "train": config.train_size}
        self.seeds = {
            f"{part}-{number}": seed_of(seed, "gymnasium", part, number) % 2**31
            for part, size in sizes.items()
            for number in range(size)
        }
        env = make()
        self.actions = read_space(env.action_space, config.bins)
        self._space = env.observation_space
        env.close()
        self._prompts = [self._open_prompt(name) for name in self.seeds]

    @property
    def letters(self) -> str:
        """The characters of actions, states and the warning about a reply that is no action."""
        return "".join(dict.fromkeys(self.actions.letters + NUMBERS + NO_ACTION))

    def train_prompts(self) -> Sequence[Prompt]:
        """Return the first observations of the training episodes."""
        return self._prompts[self.config.heldout_size :]

    def heldout_prompts(self) -> Sequence[Prompt]:
        """Return the first observations of the held-out episodes."""
        return self._prompts[: self.config.heldout_size]

    def _open_prompt(self, name: str) -> Prompt:
        env = self.make()
        observation, info = env.reset(seed=self.seeds[name])
        text = self.config.instruction or str(info.get("instruction", ""))
        message = self._show(env, observation, f"{text}\n" if text else "")
        env.close()
        return Prompt(name, (message,))

    def show(self, episode: GymEpisode, warning: str) -> Message:
        """Return the turn that shows an episode's newest observation."""
        return self._show(episode.env, episode.observation, warning)

    def _show(self, env: Any, observation: Any, opening: str) -> Message:
        if self.config.view == "state":
            return Message("user", opening + self._write_state(observation))
        if not _is_frame(observation):
            if env.render_mode != "rgb_array":
                raise DataError(
                    "task.view: frame needs an environment that renders; set kwargs: {render_mode: "
                    "rgb_array}, or view: state"
                )
            observation = env.render()
        frame = _encode_frame(observation)
        return Message("user", hide_places(opening) + IMAGE, images=(frame,))

    def _write_state(self, observation: Any) -> str:
        """Return the numbers of an observation; a text is itself."""
        if isinstance(observation, str):
            return observation
        if np.ndim(observation) == 0:
            return str(observation)
        flatten = import_module("gymnasium.spaces.utils").flatten
        # Plus 0: a small negative number would be written as -0.0.
        numbers = [
            round(float(value), self.config.digits) + 0.0
            for value in flatten(self._space, observation)
        ]
        return " ".join(f"{number:.{self.config.digits}f}" for number in numbers)

    def open(self, prompt: Prompt, seed: int) -> GymEpisode:
        """Begin the prompt's episode, which is the same for every `seed`."""
        return GymEpisode(self, prompt.id)

    def reward(self, rollout: Rollout) -> float | None:
        """Return the rewards of the turns as one number from 0 to 1; 0 without an answered turn."""
        rewards = [turn.reward for turn in rollout.turns if turn.reward is not None]
        if not rewards:
            return 0.0
        low, high = self.config.reward_range
        total = sum(rewards) if self.config.reward == "sum" else rewards[-1]
        return (min(max(total, low), high) - low) / (high - low)

    @property
    def has_expert(self) -> bool:
        """Return True if the recipe names a function that knows the best action."""
        return self._act is not None

    def expert(self, prompt: Prompt, turns: Sequence[str]) -> Mapping[str, float]:
        """Return the best action's text, and random actions with the probability `slip`."""
        best, slip = self.label(prompt.id, tuple(turns)), self.config.slip
        if not slip:
            return {best: 1.0}
        draw = random.Random(seed_of(self.seeds[prompt.id], "slip", len(turns)))
        chances = {best: 1 - slip}
        for _ in range(SLIPS):
            text = "".join(draw.choices(self.actions.letters, k=self.actions.length))
            chances[text] = chances.get(text, 0.0) + slip / SLIPS
        return chances

    def redirect(self, prompt: Prompt, turns: Sequence[str], start: str) -> Mapping[str, float]:
        """Return the best action with the student's own first numbers: dimensions are independent."""
        best = self.label(prompt.id, tuple(turns))
        return {start + best[len(start) :]: 1.0}

    def _label(self, name: str, turns: tuple[str, ...]) -> str:
        """Return the text of the best action after some turns, which are played again."""
        episode = GymEpisode(self, name)
        try:
            for turn in turns:
                episode.step(turn)
            assert self._act is not None, "only a task with an expert is asked"
            return self.actions.write(self._act(episode.env.unwrapped))
        finally:
            episode.close()


def _is_frame(observation: Any) -> bool:
    """Return True for a picture of [H, W, 3] bytes."""
    is_array = isinstance(observation, np.ndarray) and observation.dtype == np.uint8
    return is_array and observation.ndim == 3 and observation.shape[-1] == 3


def _encode_frame(frame: Any) -> str:
    """Return a picture as a `data:` URL; DataError if it is none."""
    if not _is_frame(frame):
        raise DataError(
            "task.view: the environment's frame is no array [H, W, 3] of bytes; set view: state"
        )
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(f"task.view: frame needs pillow; {suggest_install('gymnasium')}") from error
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "PNG")
    return encode_bytes(buffer.getvalue())


def build(config: Config, context: TaskContext) -> Task:
    """Open the environment; DataError if it cannot be used."""
    try:
        gymnasium = import_module("gymnasium")
    except ImportError as error:
        raise DataError(
            f"task: type gymnasium needs the package gymnasium; {suggest_install('gymnasium')}"
        ) from error
    context.packages.append("gymnasium")

    def make() -> Any:
        return gymnasium.make(config.env, disable_env_checker=True, **config.kwargs)

    seed = context.seed if config.seed is None else config.seed
    try:
        return Gymnasium(config, make, seed)
    except DataError:
        raise
    # An environment is foreign code and may fail in any way.
    except Exception as error:
        raise DataError(
            f"task.env: {config.env} cannot be used ({type(error).__name__}: {excerpt(str(error))}); "
            "write the id of an installed environment"
        ) from error
