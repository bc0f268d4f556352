"""An environment behind an OpenEnv server, with one session per conversation.

The first observation after a reset is the prompt. The student's turn is a field of each action, and
a field of each observation is the reply.
"""

import contextlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from practicum.core.strict_json import JsonError, parse_json
from practicum.core.waits import show_wait
from practicum.errors import DataError, suggest_install
from practicum.ports import (
    Episode,
    Observation,
    Task,
    TaskConfig,
    TaskContext,
)
from practicum.text.safe import excerpt
from practicum.types import Message, Prompt, Rollout

MAX_MESSAGE_BYTES = 2**20
"""The longest answer of a server that is read."""

CLOSE_SECONDS = 1.0
"""The longest wait for a server to confirm the end of a session."""


class Config(TaskConfig):
    """The server, the fields that hold texts, and the prompts to ask for."""

    type: Literal["openenv"] = "openenv"
    url: str = Field(
        pattern=r"^(http|ws)s?://[^\s@]+$",
        description="the server, as http://localhost:8000; without a password",
    )
    action: str = Field(default="text", description="the action's field for the turn's text")
    observation: str = Field(default="text", description="the field of an observation to read")
    reset: dict[str, JsonValue] = Field(
        default={}, description="further arguments of a reset, as `{split: train}`"
    )
    reward: Literal["last", "sum"] = Field(
        default="last", description="a conversation's reward: of its last turn, or of all turns"
    )
    reward_range: tuple[float, float] = Field(
        default=(0.0, 1.0), description="the smallest and largest reward of a conversation"
    )
    train_size: int = Field(default=64, ge=1, description="resets to train on, seeds from 0")
    heldout_size: int = Field(default=16, ge=0, description="resets with the seeds after these")
    seconds: float = Field(default=60.0, gt=0, description="the longest wait for the server")

    @model_validator(mode="after")
    def _check_range(self) -> "Config":
        low, high = self.reward_range
        if not low < high:
            raise ValueError(f"reward_range: {low:g} is not below {high:g}; write [least, largest]")
        return self


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)
    observation: dict[str, JsonValue]
    reward: float | bool | None = None
    done: bool


class ServerError(RuntimeError):
    """The server refused a message, or its answer does not follow the protocol."""


class SteppedEnvironment(Episode):
    """One environment at the server, from a reset on."""

    def __init__(self, config: Config) -> None:
        client = import_module("websockets.sync.client")
        address = f"ws{config.url.removeprefix('http').removeprefix('ws')}".rstrip("/")
        self._config = config
        self._open = contextlib.ExitStack()
        self._socket = self._open.enter_context(
            client.connect(
                f"{address}/ws",
                open_timeout=config.seconds,
                close_timeout=CLOSE_SECONDS,
                max_size=MAX_MESSAGE_BYTES,
            )
        )
        self._rewards: list[float] = []

    def reset(self, seed: int) -> str:
        """Reset the environment with a seed, and return the first observation."""
        self._rewards = []
        return self._read_text(
            self._ask("reset", {"index": seed, **self._config.reset, "seed": seed})
        )

    def step(self, turn: str) -> Observation:
        """Act with the student's turn; see `practicum.ports.Episode`."""
        answer = self._ask("step", {self._config.action: turn})
        reward = None if answer.reward is None else float(answer.reward)
        if reward is not None:
            self._rewards.append(reward)
        if answer.done:
            self._check_rewards()
        # The last observation may be empty, and no turn answers it.
        message = None if answer.done else Message("user", self._read_text(answer))
        return Observation(message, reward=reward)

    def _check_rewards(self) -> None:
        """Raise ServerError if the conversation's reward is outside `reward_range`."""
        total, (low, high) = add_rewards(self._rewards, self._config), self._config.reward_range
        if not low <= total <= high:
            raise ServerError(
                f"the reward is {total:g}; set task.reward_range to the range of the server"
            )

    def close(self) -> None:
        """End the session, even if the server no longer listens."""
        with contextlib.suppress(OSError, import_module("websockets").ConnectionClosed):
            self._socket.send(json.dumps({"type": "close"}))
        self._open.close()

    def _ask(self, kind: str, data: Mapping[str, JsonValue]) -> _Answer:
        self._socket.send(json.dumps({"type": kind, "data": data}))
        text = self._socket.recv(timeout=self._config.seconds)
        try:
            reply = parse_json(text)
        except JsonError as error:
            raise ServerError(f"the answer to {kind} is not JSON ({error})") from error
        try:
            if reply["type"] == "observation":
                return _Answer.model_validate(reply["data"])
            problem = str(reply["data"]["message"])
        # An integer beyond every float is an OverflowError.
        except (LookupError, TypeError, ValidationError, OverflowError) as error:
            raise ServerError(
                f"the answer to {kind} is no observation: {excerpt(json.dumps(reply))}"
            ) from error
        raise ServerError(f"{kind} was refused: {excerpt(problem)}")

    def _read_text(self, answer: _Answer) -> str:
        name = self._config.observation
        text = answer.observation.get(name)
        if not isinstance(text, str):
            raise ServerError(
                f"the observation has no text {name!r}, it has {', '.join(answer.observation)}; "
                "set task.observation to one of them"
            )
        return text


class OpenEnv(Task):
    """The conversations with a server's environments."""

    def __init__(self, config: Config, prompts: Sequence[Prompt]) -> None:
        self._config = config
        self._prompts = prompts
        self._seeds = {prompt.id: seed for seed, prompt in enumerate(prompts)}

    def train_prompts(self) -> Sequence[Prompt]:
        """Return the first observations to train on."""
        return self._prompts[: self._config.train_size]

    def heldout_prompts(self) -> Sequence[Prompt]:
        """Return the first observations to evaluate on."""
        return self._prompts[self._config.train_size :]

    def open(self, prompt: Prompt, seed: int) -> SteppedEnvironment:
        """Open a session with the prompt's environment.

        All conversations about a prompt have the same environment for every `seed`, so their rewards
        differ only by their turns.
        """
        session, first_seed = SteppedEnvironment(self._config), self._seeds[prompt.id]
        try:
            if session.reset(first_seed) != prompt.messages[0].content:
                raise ServerError(f"a reset with seed {first_seed} begins otherwise than before")
        except BaseException:
            session.close()
            raise
        return session

    def reward(self, rollout: Rollout) -> float | None:
        """Return the rewards of the turns as one number from 0 to 1; 0 if no turn has one.

        The reward of a truncated conversation is clamped to `reward_range`.
        """
        rewards = [turn.reward for turn in rollout.turns if turn.reward is not None]
        if not rewards:
            return 0.0
        low, high = self._config.reward_range
        total = min(max(add_rewards(rewards, self._config), low), high)
        return (total - low) / (high - low)


def add_rewards(rewards: Sequence[float], config: Config) -> float:
    """Combine the rewards of a conversation's turns as `config.reward` says, in the server's scale."""
    return sum(rewards) if config.reward == "sum" or not rewards else rewards[-1]


def build(config: Config, context: TaskContext) -> Task:
    """Ask the server for the prompts; DataError if it returns none."""
    if importlib.util.find_spec("websockets") is None:
        raise DataError(
            f"task: type openenv needs the package websockets; {suggest_install('openenv')}"
        )
    count = config.train_size + config.heldout_size
    websockets = import_module("websockets")
    try:
        session = SteppedEnvironment(config)
        with contextlib.closing(session), show_wait("first observations", count) as wait:
            texts = []
            for seed in range(count):
                texts.append(session.reset(seed))
                wait.advance()
    except (OSError, ValueError, ServerError, websockets.WebSocketException) as error:
        raise DataError(
            f"task.url: {config.url} gave no first observation ({type(error).__name__}: "
            f"{excerpt(str(error))}); start an OpenEnv server there"
        ) from error
    prompts = [
        Prompt(f"openenv-{seed}", (Message("user", text),)) for seed, text in enumerate(texts)
    ]
    return OpenEnv(config, prompts)
