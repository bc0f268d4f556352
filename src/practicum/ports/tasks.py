"""The protocols of tasks: prompts with a verifier, conversations, experts, and tools.

A task handles text and no tokens.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar, Protocol, runtime_checkable

from practicum.types import (
    CallOutcome,
    CallRecord,
    FrozenConfig,
    Message,
    Prompt,
    Rollout,
    StopReason,
    ToolUse,
)


@dataclass(frozen=True, slots=True)
class Observation:
    """An episode's answer to one turn of the student."""

    message: Message | None
    """The next turn, with the role `user` or another role of the chat template, such as `tool`.

    None: the conversation is over.
    """
    notes: Mapping[str, str] = field(default_factory=dict)
    """Texts about the rollout by name; the student does not read them."""
    more: tuple[Message, ...] = ()
    """The messages after the first one, such as the results of a turn's other calls."""
    reward: float | None = None
    """The reward of the turn, if the environment gives one for each turn."""
    calls: tuple[CallRecord, ...] = ()
    """The calls of tools that the turn made."""
    stop_reason: StopReason = "stop"
    """The reason for the end of the conversation, if it is over."""
    tokens: tuple[int, ...] = ()
    """The next turn's tokens instead of messages, from a harness that writes tokens itself."""
    warning: str = ""
    """The beginning of `message` that is no observation, such as a complaint about the turn's form.

    Its tokens have the author `harness`, so no term on the environment's tokens learns them.
    """

    @property
    def messages(self) -> tuple[Message, ...]:
        """Return all messages of the next turn; none if the conversation is over."""
        return () if self.message is None else (self.message, *self.more)


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """A turn of the student: all tokens before it, its own and their log-probabilities."""

    before: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str = ""
    """The text of the turn, for requests made with messages."""
    stop_reason: StopReason = "stop"


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A program's or a user's request for the student's turn after some tokens or messages.

    `reply` delivers the turn, or the reason why it is missing.
    """

    tokens: tuple[int, ...] = ()
    messages: tuple[Message, ...] = ()
    max_tokens: int | None = None
    answers: "SimpleQueue[SampledTurn | str]" = field(default_factory=SimpleQueue)

    def reply(self, turn: SampledTurn | str) -> None:
        """Answer the request."""
        self.answers.put(turn)


class Episode:
    """One conversation with an environment: it may hold a process or a browser, and may fail.

    An exception of a method ends this conversation only, with the stop reason `timeout` for
    TimeoutError and `error` for others. The rollout's note `error` holds its text.
    """

    def step(self, turn: str) -> Observation:
        """Answer the student's turn."""
        raise NotImplementedError

    def answer_tokens(self, turn: SampledTurn) -> Observation:
        """Answer a turn token for token, instead of `step`, for a program that drives the
        conversation.

        Return the tokens that continue the conversation, or none at its end.
        """
        raise NotImplementedError

    @property
    def takes_tokens(self) -> bool:
        """Return True if turns are passed as tokens and not as text."""
        return type(self).answer_tokens is not Episode.answer_tokens

    def close(self) -> None:
        """Release the episode's resources; called once, also after an error."""


class ToolProblem(Exception):
    """A call without a result: its outcome, and the text that the model reads instead of a result."""

    def __init__(self, outcome: CallOutcome, text: str) -> None:
        self.outcome: CallOutcome = outcome
        super().__init__(text)


class ToolSession:
    """The tools of one conversation; they may hold a process."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the result of a call that a model wrote; raise ToolProblem if it has no result."""
        raise NotImplementedError

    def find_part(self, name: str) -> Hashable:
        """Return a key of the part that a tool belongs to, and open the part.

        Calls to different parts may run concurrently. By default all tools are one part.
        """
        return id(self)

    def close(self) -> None:
        """Release the session's resources; called once, also after an error."""


@runtime_checkable
class Toolbox(Protocol):
    """The tools of a task. Nothing that a model writes may harm them or the run."""

    @property
    def use(self) -> ToolUse:
        """The schemas of the tools, and the form of the calls."""
        ...

    @property
    def turns(self) -> int:
        """The number of turns with calls after which a conversation ends."""
        ...

    @property
    def bad_calls(self) -> int:
        """The number of calls without a result after which a conversation ends."""
        ...

    def open(self, prompt: Prompt, seed: int) -> ToolSession:
        """Open the tools for one conversation; all randomness in them follows from `seed`."""
        ...


class OpensEpisodes(Protocol):
    """The environment's side of conversations: a task that answers, or a substitute for it."""

    def open(self, prompt: Prompt, seed: int) -> Episode:
        """Begin a conversation about a prompt; all randomness in it follows from `seed`.

        A conversation that ends within its first turn is never opened.
        """
        ...


@dataclass(frozen=True, slots=True)
class TaskContext:
    """The run's seed, the base folder of relative paths, and the file of rejected rows.

    A task adds to `packages` each package with a version that affects its prompts and rewards.
    """

    seed: int
    base_dir: Path
    rejected_path: Path | None = None
    packages: list[str] = field(default_factory=list)


class TaskConfig(FrozenConfig):
    """The settings of a task in a recipe; a subclass has a field `type` with its name as default.

    - offers_tools: answers may call tools; only then is the task built for a chat
    - reads_files: it reads files of the user, see `find_problems`
    """

    offers_tools: ClassVar[bool] = False
    reads_files: ClassVar[bool] = False

    def find_problems(self, base_dir: Path) -> list[str]:
        """Return the problems of the files, one line each; relative paths start at `base_dir`."""
        return []


class Task:
    """A source of prompts with a verifier; a task handles text and no tokens.

    A task must have `train_prompts`, `heldout_prompts` and `reward`. All further methods are
    optional: a class supports a feature if it overrides the method.
    """

    def train_prompts(self) -> Sequence[Prompt]:
        """Return the prompts to train on, in a fixed order."""
        raise NotImplementedError

    def heldout_prompts(self) -> Sequence[Prompt]:
        """Return the prompts to evaluate on, without any training prompt."""
        raise NotImplementedError

    def reward(self, rollout: Rollout) -> float | None:
        """Return the reward of a rollout, from 0 to 1, or None if it cannot be decided.

        `rollout.text` is the student's text. A conversation also has `rollout.turns`, and
        `rollout.stop_reason` tells if the environment ended it early.
        """
        raise NotImplementedError

    @property
    def is_stream(self) -> bool:
        """Return True if the run reads the training prompts in their order, such as arriving requests."""
        return False

    @property
    def letters(self) -> str:
        """Return every character that the task can use, once each, for from-scratch models."""
        return ""

    def feedback(self, rollout: Rollout) -> str | None:
        """Return feedback in words about a rollout with its reward, or None."""
        return None

    def count_answers(self, rollout: Rollout) -> int | None:
        """Return how often a conversation states its answer; it should be once.

        0 means a broken format, None a task that requires no format; see the source `resample`.
        """
        return None

    def count_valid_steps(self, prompt: Prompt, steps: Sequence[str]) -> int | None:
        """Return the number of leading valid steps of an answer; None if it is unknown.

        A step may be checked by running it, after all earlier steps.
        """
        return None

    def expert(self, prompt: Prompt, turns: Sequence[str]) -> Mapping[str, float]:
        """Return the probability of each full text of the right next turn; they sum to 1.

        If the task opens conversations, its episodes may only depend on the prompt and the turns.
        """
        raise NotImplementedError

    def redirect(self, prompt: Prompt, turns: Sequence[str], start: str) -> Mapping[str, float]:
        """Return the expert's probabilities if the turn began as no text of `expert` does.

        Each full text begins with `start`. Without this method such a turn should end at once.
        """
        raise NotImplementedError

    @property
    def redirects(self) -> bool:
        """Return True if the expert knows how to continue any beginning of a turn."""
        return type(self).redirect is not Task.redirect

    @property
    def has_expert(self) -> bool:
        """Return True if the task knows the right turns."""
        return type(self).expert is not Task.expert

    def open(self, prompt: Prompt, seed: int) -> Episode:
        """Begin a conversation, in which a completion is several turns; see `OpensEpisodes`."""
        raise NotImplementedError

    @property
    def opens_episodes(self) -> bool:
        """Return True if the task answers the student's turns itself."""
        return type(self).open is not Task.open

    @property
    def toolbox(self) -> Toolbox | None:
        """Return the tools that answers may call; a turn without a call is the answer.

        If the task opens conversations too, its episode replies to the turns without a call.
        """
        return None

    def open_tokens(
        self, prompt: Prompt, seed: int, save_tokenizer: Callable[[Path], None]
    ) -> Episode:
        """Begin a conversation that another program drives, token for token.

        The program reads the tokenizer from a folder that it names.
        """
        raise NotImplementedError

    @property
    def is_harnessed(self) -> bool:
        """Return True if another program drives the conversations."""
        return type(self).open_tokens is not Task.open_tokens

    @property
    def converses(self) -> bool:
        """Return True if the task's completions are conversations."""
        return self.opens_episodes or self.toolbox is not None or self.is_harnessed

    @property
    def patience(self) -> float:
        """Return the longest wait for a request of a user, in seconds."""
        return 0.0

    def receive(self, seconds: float) -> Sequence[TurnRequest]:
        """Return the waiting requests of users, oldest first; empty if none arrives in time.

        The prompts then come from users who chat with the student while it learns. The first call
        opens the endpoint.
        """
        raise NotImplementedError

    @property
    def serves_users(self) -> bool:
        """Return True if users chat with the student."""
        return type(self).receive is not Task.receive

    def close(self) -> None:
        """Refuse the waiting requests and close the endpoint, if it is open."""
