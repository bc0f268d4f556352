"""A walk along a line, turn by turn: noise pushes the walker off course and it can always recover.

Each turn shows the position and two digits. The digits push the walker, and its action, a letter,
pushes back; after the last turn the walker should be at position 0. Sometimes the student sees a
wrong digit, so that even a perfect student errs and has to know how to recover: that decides the
cost of a distribution shift (DAgger 1011.0686, DART 1703.09327). Walks start at 0, so that
demonstrations without a mistake never leave 0.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from practicum.agents import FunctionEpisode
from practicum.core.randomness import seed_of
from practicum.ports import Task, TaskConfig, TaskContext
from practicum.types import Message, Prompt, Rollout

FARTHEST, STRONGEST = 6, 2
"""Positions are -6 to 6, actions -2 to 2."""

POSITIONS = "ABCDEFGHIJKLM"
"""The letters of the positions: G is 0."""

ACTIONS = "vwxyz"
"""The letters of the actions: x is 0."""


class Config(TaskConfig):
    """The length of a walk, the noise of the student's digits and the slips of the expert."""

    type: Literal["walker"] = "walker"
    turns: int = Field(default=16, ge=1, le=1000, description="turns of a walk")
    spread: int = Field(default=0, ge=0, le=FARTHEST, description="how far from 0 a walk may start")
    noise: float = Field(
        default=0.04,
        ge=0,
        le=1,
        description="probability that the student sees a wrong first digit",
    )
    slip: float = Field(
        default=0.04,
        ge=0,
        lt=1,
        description="probability that the expert takes another action than the best action",
    )
    turn_rewards: bool = Field(
        default=False, description="also reward each turn that ends at 0, at most 1 in total"
    )
    train_size: int = Field(default=4096, ge=1, description="walks to train on")
    heldout_size: int = Field(default=256, ge=0, description="other walks, to evaluate on")
    seed: int | None = Field(default=None, description="seed of the walks; none: the run's seed")
    train_seed: int | None = Field(
        default=None, description="seed of only the training walks; none: the same as `seed`"
    )


@dataclass(frozen=True, slots=True)
class WalkerTurn:
    """The two digits of a turn that push the walker, and the first digit that the student sees."""

    cue: int
    digit: int
    visible_cue: int

    @property
    def push(self) -> int:
        """The push of the digits, -2 to 2."""
        return (self.cue * self.digit + self.cue) % 5 - STRONGEST


@dataclass(frozen=True, slots=True)
class Walk:
    """A start position and the turns that follow."""

    start: int
    turns: tuple[WalkerTurn, ...]

    def find_position(self, actions: Sequence[str]) -> int:
        """Return the position after these actions; a text that is not an action counts as 0."""
        position = self.start
        for turn, action in zip(self.turns, actions, strict=False):
            position = _clamp(position + turn.push + _parse_action(action), FARTHEST)
        return position

    def choose_best_action(self, actions: Sequence[str]) -> str:
        """Return the next action that brings the walker nearest to 0."""
        step = -(self.find_position(actions) + self.turns[len(actions)].push)
        return ACTIONS[_clamp(step, STRONGEST) + STRONGEST]

    def observe(self, actions: Sequence[str]) -> str:
        """Return the student's view after these actions: position and two digits, 3 characters."""
        turn = self.turns[len(actions)]
        position = POSITIONS[self.find_position(actions) + FARTHEST]
        return f"{position}{turn.visible_cue}{turn.digit}"


def _clamp(value: int, limit: int) -> int:
    return max(-limit, min(limit, value))


def _parse_action(text: str) -> int:
    letter = text.strip()
    return ACTIONS.index(letter) - STRONGEST if len(letter) == 1 and letter in ACTIONS else 0


class Walker(Task):
    """Seeded walks with a demonstrator."""

    def __init__(self, config: Config, seed: int) -> None:
        self._config = config
        seed = seed if config.seed is None else config.seed
        train_seed = seed if config.train_seed is None else config.train_seed
        parts = {"heldout": (config.heldout_size, seed), "train": (config.train_size, train_seed)}
        self._walks = {
            f"{part}-{number}": _draw_walk(config, seed_of(part_seed, "walker", part, number))
            for part, (size, part_seed) in parts.items()
            for number in range(size)
        }
        prompts = [
            Prompt(name, (Message("user", walk.observe(())),)) for name, walk in self._walks.items()
        ]
        self._heldout, self._train = prompts[: config.heldout_size], prompts[config.heldout_size :]

    @property
    def letters(self) -> str:
        """The letters of positions, digits and actions."""
        return f"{POSITIONS}0123456789{ACTIONS}"

    def train_prompts(self) -> Sequence[Prompt]:
        """Return the training walks, as the view of their first turn."""
        return self._train

    def heldout_prompts(self) -> Sequence[Prompt]:
        """Return the held-out walks."""
        return self._heldout

    def open(self, prompt: Prompt, seed: int) -> FunctionEpisode:
        """Begin a walk with the noise of its prompt; each answer shows the next turn."""
        # The walk is drawn from the name of its prompt and not from `seed`: all completions of a
        # prompt face the same noise, so that their rewards differ only by their actions.
        walk, turns = self._walks[prompt.id], self._config.turns
        return FunctionEpisode(
            lambda actions: None if len(actions) >= turns else walk.observe(actions),
            # The sum is at most 1, as much as the walk's own reward.
            (lambda actions: float(walk.find_position(actions) == 0) / turns)
            if self._config.turn_rewards
            else None,
        )

    def expert(self, prompt: Prompt, turns: Sequence[str]) -> Mapping[str, float]:
        """Return the expert's probability of each action: best action and slips.

        The expert knows the digits that push the walker, not the visible ones.
        """
        best = self._walks[prompt.id].choose_best_action(turns)
        slip = self._config.slip
        return {
            action: 1 - slip if action == best else slip / (len(ACTIONS) - 1) for action in ACTIONS
        }

    def reward(self, rollout: Rollout) -> float | None:
        """Return 1 if a complete walk, one action per turn, ends at 0, else 0."""
        actions = rollout.replies
        is_complete = len(actions) == self._config.turns
        return float(is_complete and self._walks[rollout.prompt.id].find_position(actions) == 0)


def _draw_walk(config: Config, seed: int) -> Walk:
    draw = random.Random(seed)
    start = draw.randint(-config.spread, config.spread)
    return Walk(start, tuple(_draw_turn(config, draw) for _ in range(config.turns)))


def _draw_turn(config: Config, draw: random.Random) -> WalkerTurn:
    # All four numbers are drawn at any noise, so that the noise changes only the visible digit.
    cue, digit, false_cue = (draw.randrange(10) for _ in range(3))
    is_wrong = draw.random() < config.noise
    return WalkerTurn(cue, digit, false_cue if is_wrong else cue)


def build(config: Config, context: TaskContext) -> Task:
    """Draw the walks."""
    return Walker(config, context.seed)
