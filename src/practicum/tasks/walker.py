"""A walk along a line, turn by turn, that noise pushes off course and that the walker can always bring back.

Each turn shows the position and two digits. The digits push the walker, and its action, a letter, pushes back; after the last
turn it should stand at 0. Now and then the student sees a wrong digit, so that it errs however well it has learned and has to
know how to recover: what a distribution shift costs depends on that (DAgger 1011.0686, DART 1703.09327). Walks start at 0, so
that demonstrations without a mistake never leave it.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from practicum.core.randomness import seed_of
from practicum.ports import Task
from practicum.tasks import FunctionEpisode, TaskContext
from practicum.types import Message, Prompt, Rollout

FARTHEST, STRONGEST = 6, 2
"""Positions are -6 to 6, actions -2 to 2."""

POSITIONS = "ABCDEFGHIJKLM"
"""The position as it is shown: G is 0."""

ACTIONS = "vwxyz"
"""The actions as they are written: x is 0."""


class Config(BaseModel):
    """How long a walk is, how often the student sees a wrong digit, and how often the expert slips."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["walker"] = "walker"
    turns: int = Field(default=16, ge=1, le=1000, description="turns of a walk")
    spread: int = Field(default=0, ge=0, le=FARTHEST, description="how far from 0 a walk may start")
    noise: float = Field(
        default=0.04, ge=0, le=1, description="how often the student sees another first digit"
    )
    slip: float = Field(
        default=0.04,
        ge=0,
        lt=1,
        description="how often the expert takes another action than the best",
    )
    train_size: int = Field(default=4096, ge=1, description="walks to train on")
    heldout_size: int = Field(default=256, ge=0, description="other walks, to evaluate on")
    seed: int | None = Field(default=None, description="of the walks; none: the run's")


@dataclass(frozen=True, slots=True)
class Turn:
    """The two digits of a turn as they act, and the first one as the student sees it."""

    cue: int
    digit: int
    shown: int

    @property
    def push(self) -> int:
        """How far the digits push, -2 to 2."""
        return (self.cue * self.digit + self.cue) % 5 - STRONGEST


@dataclass(frozen=True, slots=True)
class Walk:
    """A start and the turns from there."""

    start: int
    turns: tuple[Turn, ...]

    def position(self, said: Sequence[str]) -> int:
        """Where the actions lead that were said so far; what is no action is 0."""
        position = self.start
        for turn, action in zip(self.turns, said, strict=False):
            position = _within(position + turn.push + _action(action), FARTHEST)
        return position

    def best(self, said: Sequence[str]) -> str:
        """The action after those: the one that brings the walker nearest to 0."""
        wanted = -(self.position(said) + self.turns[len(said)].push)
        return ACTIONS[_within(wanted, STRONGEST) + STRONGEST]

    def seen(self, said: Sequence[str]) -> str:
        """What is shown after the actions so far: the position and two digits, three characters."""
        turn = self.turns[len(said)]
        return f"{POSITIONS[self.position(said) + FARTHEST]}{turn.shown}{turn.digit}"


def _within(value: int, limit: int) -> int:
    return max(-limit, min(limit, value))


def _action(text: str) -> int:
    letter = text.strip()
    return ACTIONS.index(letter) - STRONGEST if len(letter) == 1 and letter in ACTIONS else 0


class Walker:
    """Seeded walks; see `practicum.ports.Environment`, and `practicum.ports.Expert` for who knows the way."""

    def __init__(self, config: Config, seed: int) -> None:
        self._config = config
        seed = seed if config.seed is None else config.seed
        sizes = {"heldout": config.heldout_size, "train": config.train_size}
        self._walks = {
            f"{part}-{number}": _walk(config, seed_of(seed, "walker", part, number))
            for part, size in sizes.items()
            for number in range(size)
        }
        prompts = [
            Prompt(name, (Message("user", walk.seen(())),)) for name, walk in self._walks.items()
        ]
        self._heldout, self._train = prompts[: config.heldout_size], prompts[config.heldout_size :]

    @property
    def letters(self) -> str:
        """Positions, digits and actions."""
        return f"{POSITIONS}0123456789{ACTIONS}"

    def train_prompts(self) -> Sequence[Prompt]:
        """The walks to train on, as what their first turn shows."""
        return self._train

    def heldout_prompts(self) -> Sequence[Prompt]:
        """Other walks."""
        return self._heldout

    def open(self, prompt: Prompt, seed: int) -> FunctionEpisode:
        """Begin a walk, whose noise is the prompt's own; each answer shows the next turn."""
        walk = self._walks[prompt.id]
        return FunctionEpisode(
            lambda said: None if len(said) >= self._config.turns else walk.seen(said)
        )

    def expert(self, prompt: Prompt, said: Sequence[str]) -> Mapping[str, float]:
        """The best action, by the digits as they act; each of the others where the expert slips."""
        best = self._walks[prompt.id].best(said)
        slip = self._config.slip
        return {
            action: 1 - slip if action == best else slip / (len(ACTIONS) - 1) for action in ACTIONS
        }

    def reward(self, rollout: Rollout) -> float | None:
        """Return 1 where a whole walk, an action a turn, ends at 0, else 0."""
        said = rollout.replies
        return float(
            len(said) == self._config.turns and self._walks[rollout.prompt.id].position(said) == 0
        )


def _walk(config: Config, seed: int) -> Walk:
    draw = random.Random(seed)
    start = draw.randint(-config.spread, config.spread)
    return Walk(start, tuple(_turn(config, draw) for _ in range(config.turns)))


def _turn(config: Config, draw: random.Random) -> Turn:
    """A turn of a walk; the same draws are made whatever the noise, so that only what is seen depends on it."""
    cue, digit, other, wrong = (
        draw.randrange(10),
        draw.randrange(10),
        draw.randrange(10),
        draw.random() < config.noise,
    )
    return Turn(cue, digit, other if wrong else cue)


def build(config: Config, context: TaskContext) -> Task:
    """Draw the walks."""
    return Walker(config, context.seed)
