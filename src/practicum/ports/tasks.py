"""The protocols of tasks: prompts with a verifier, conversations, experts, and tools.

A task handles text and no tokens.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, runtime_checkable

from practicum.types import CallOutcome, CallRecord, Message, Prompt, Rollout, StopReason, ToolUse


@runtime_checkable
class Task(Protocol):
    """A source of prompts with a verifier; a task handles text and no tokens."""

    def train_prompts(self) -> Sequence[Prompt]:
        """Return the prompts to train on, in a fixed order."""
        ...

    def heldout_prompts(self) -> Sequence[Prompt]:
        """Return the prompts to evaluate on; none of them is a training prompt."""
        ...

    def reward(self, rollout: Rollout) -> float | None:
        """Return the reward of a rollout, from 0 to 1, or None if it cannot be decided.

        `rollout.text` is the student's text. A conversation also has `rollout.turns`, and
        `rollout.stop_reason` tells if the environment ended it early.
        """
        ...


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
    """Why the conversation is over, if it is."""
    tokens: tuple[int, ...] = ()
    """The next turn's tokens in the place of messages, from a harness that writes them itself."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """Return all messages of the next turn; none if the conversation is over."""
        return () if self.message is None else (self.message, *self.more)


@runtime_checkable
class Episode(Protocol):
    """One conversation with an environment: it may hold a process or a browser, and may fail.

    An exception of a method ends this conversation only, with the stop reason `timeout` for
    TimeoutError and `error` for others. The rollout's note `error` holds its text.
    """

    def step(self, turn: str) -> Observation:
        """Answer the student's turn."""
        ...

    def close(self) -> None:
        """Release the episode's resources; called once, also after an error."""
        ...


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """A turn of the student: all tokens before it, its own and their log-probabilities."""

    before: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str = ""
    """Its text, for those who asked in messages."""
    stop_reason: StopReason = "stop"


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A program's or a user's request for the student's turn after some tokens or messages.

    `reply` hands the turn over, or the reason why there is none.
    """

    tokens: tuple[int, ...] = ()
    messages: tuple[Message, ...] = ()
    max_tokens: int | None = None
    answers: "SimpleQueue[SampledTurn | str]" = field(default_factory=SimpleQueue)

    def reply(self, turn: SampledTurn | str) -> None:
        """Answer the request."""
        self.answers.put(turn)


@runtime_checkable
class TokenEpisode(Episode, Protocol):
    """A conversation that a harness leads: it writes the tokens between the turns itself.

    Its turns are not handed over as text: `answer_tokens` stands in the place of `step`.
    """

    def answer_tokens(self, turn: SampledTurn) -> Observation:
        """Hand the harness a turn; return the tokens with which it goes on, or none at its end."""
        ...


@runtime_checkable
class Harnessed(Task, Protocol):
    """A task whose conversations another program leads, token for token."""

    def open_tokens(
        self, prompt: Prompt, seed: int, save_tokenizer: Callable[[Path], None]
    ) -> TokenEpisode:
        """Begin a conversation; the harness reads the tokenizer from a folder that it names."""
        ...


@runtime_checkable
class ServesUsers(Task, Protocol):
    """A task whose prompts come from users who speak with the student while it learns."""

    @property
    def patience(self) -> float:
        """The longest wait for a request, in seconds."""
        ...

    def receive(self, seconds: float) -> Sequence[TurnRequest]:
        """Return the requests that wait, oldest first; none if there is none within the seconds.

        The first call opens the endpoint.
        """
        ...

    def close(self) -> None:
        """Refuse those that wait and close the endpoint, if it is open."""
        ...


@runtime_checkable
class OpensEpisodes(Protocol):
    """The other side of conversations: a task that answers, or what stands for it."""

    def open(self, prompt: Prompt, seed: int) -> Episode:
        """Begin a conversation about a prompt; all randomness in it follows from `seed`.

        A conversation that ends within its first turn is never opened.
        """
        ...


@runtime_checkable
class Environment(Task, OpensEpisodes, Protocol):
    """A task that answers the student: a completion is a conversation and has one reward."""


@runtime_checkable
class GivesFeedback(Task, Protocol):
    """A task that can say in words what it thinks of an answer."""

    def feedback(self, rollout: Rollout) -> str | None:
        """Return what there is to say of a rollout with its reward, or None."""
        ...


@runtime_checkable
class CountsAnswers(Task, Protocol):
    """A task that asks for a form of answers, and sees how often a conversation states its answer.

    Once is the form; see the source `resample`.
    """

    def count_answers(self, rollout: Rollout) -> int | None:
        """Return the number of answers, 0 for a broken form, or None if no form is asked for."""
        ...


@runtime_checkable
class Expert(Task, Protocol):
    """A task that knows the right turns.

    If it is an environment too, its episodes may depend on the prompt and the turns only.
    """

    def expert(self, prompt: Prompt, turns: Sequence[str]) -> Mapping[str, float]:
        """Return the probability of each full text of the next turn; the probabilities sum to 1."""
        ...


@runtime_checkable
class HasAlphabet(Task, Protocol):
    """A task that lists every character it can use, for from-scratch models."""

    @property
    def letters(self) -> str:
        """Each character once."""
        ...


class ToolProblem(Exception):
    """A call without a result: its outcome, and what the model reads instead of a result."""

    def __init__(self, outcome: CallOutcome, text: str) -> None:
        self.outcome: CallOutcome = outcome
        super().__init__(text)


@runtime_checkable
class ToolSession(Protocol):
    """The tools of one conversation; they may hold a process."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the result of a call that a model wrote; ToolProblem if there is none."""
        ...

    def close(self) -> None:
        """Release what the session holds; called once, also after an error."""
        ...


@runtime_checkable
class SeparateTools(ToolSession, Protocol):
    """Tools of which some share nothing with others, so that calls to both may be made at once."""

    def find_part(self, name: str) -> Hashable:
        """Return what stands for the part that a tool belongs to, and open it."""
        ...


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


@runtime_checkable
class HasTools(Task, Protocol):
    """A task whose answers may call tools: a turn without a call is the answer.

    If the task is an environment too, its episode replies to the turns without a call.
    """

    @property
    def toolbox(self) -> Toolbox:
        """The tools."""
        ...


def answers_back(task: Task) -> bool:
    """Return True if the task's completions are conversations."""
    return isinstance(task, Environment | HasTools | Harnessed)
