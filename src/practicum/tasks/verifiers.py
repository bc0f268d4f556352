"""The tasks of a `verifiers` taskset: its harness leads the conversations and it gives the rewards.

The harness requests tokens from an endpoint of this process, and the student samples them as in any
other conversation. Every token comes from the harness or the student: nothing is tokenised again.
"""

import queue
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, JsonValue, model_validator

from practicum.agents.harnesses import AgentEnd, VerifiersRunner, open_runner
from practicum.agents.token_engine import CLOSED, EngineLine, TokenEngine
from practicum.core.abandon import check
from practicum.errors import DataError
from practicum.ports import (
    Episode,
    Observation,
    SampledTurn,
    Task,
    TaskConfig,
    TaskContext,
    TurnRequest,
)
from practicum.types import Prompt, Rollout

POLL_SECONDS = 0.5
"""The longest wait for a harness before cancellation is checked."""


class Config(TaskConfig):
    """The taskset, the harness, and the numbers of tasks."""

    type: Literal["verifiers"] = "verifiers"
    taskset: str = Field(min_length=1, description="the installed taskset, by its id")
    settings: dict[str, JsonValue] = Field(default={}, description="its settings, without `id`")
    harness: str | None = Field(
        default=None,
        description="a harness by its id; none: a chat loop in this process, with the task's tools",
    )
    runs_code_here: bool = Field(
        default=False,
        description="allow a harness that lets the student run programs on this machine, without "
        "a sandbox",
    )
    reward_range: tuple[float, float] = Field(
        default=(0.0, 1.0), description="the smallest and largest reward"
    )
    train_size: int = Field(default=64, ge=1, description="tasks to train on, the first ones")
    heldout_size: int = Field(default=16, ge=0, description="held-out tasks, after these")
    seconds: float = Field(
        default=120.0,
        gt=0,
        description="the longest wait for the harness between two turns",
    )

    @model_validator(mode="after")
    def _check_range(self) -> "Config":
        low, high = self.reward_range
        if not low < high:
            raise ValueError(f"reward_range: {low:g} is not below {high:g}; write [least, largest]")
        return self


class HarnessError(RuntimeError):
    """The harness failed, or continued from another text than the conversation's."""


@dataclass(slots=True)
class HarnessEpisode(Episode):
    """A conversation that a harness leads."""

    engine: TokenEngine
    line: EngineLine
    run: "Future[AgentEnd]"
    seconds: float
    reward_range: tuple[float, float]
    pending: TurnRequest | None = None

    def answer_tokens(self, turn: SampledTurn) -> Observation:
        """Pass the turn to the waiting request, and return the next observation."""
        pending = self.pending or self._receive()
        if isinstance(pending, AgentEnd):
            raise HarnessError(pending.problem or "the harness ended without a turn of the model")
        if pending.tokens != turn.before:
            raise HarnessError(_explain_difference(turn.before, pending.tokens))
        pending.reply(turn)
        self.pending = None
        event = self._receive()
        if isinstance(event, AgentEnd):
            return self._end(event)
        text = (*turn.before, *turn.tokens)
        if event.tokens[: len(text)] != text or len(event.tokens) == len(text):
            event.reply(CLOSED)
            raise HarnessError(_explain_difference(text, event.tokens))
        self.pending = event
        return Observation(None, tokens=event.tokens[len(text) :])

    def _end(self, end: AgentEnd) -> Observation:
        """Return the end of the conversation with its reward."""
        if end.problem:
            raise HarnessError(end.problem)
        low, high = self.reward_range
        if end.reward is not None and not low <= end.reward <= high:
            raise HarnessError(
                f"the reward is {end.reward:g}; set task.reward_range to the range of the taskset"
            )
        return Observation(None, reward=end.reward)

    def _receive(self) -> "TurnRequest | AgentEnd":
        """Return the next request of the harness, or its end; TimeoutError if neither comes."""
        waited = 0.0
        while waited < self.seconds:
            check()
            try:
                event = self.line.events.get(timeout=min(POLL_SECONDS, self.seconds))
            except queue.Empty:
                waited += min(POLL_SECONDS, self.seconds)
                continue
            if isinstance(event, TurnRequest):
                return event
            return _read_end(self.run)
        raise TimeoutError(f"the harness did nothing for task.seconds, {self.seconds:g} s")

    def close(self) -> None:
        """Cancel the harness if it still runs, and refuse its requests."""
        self.run.cancel()
        if self.pending is not None:
            self.pending.reply(CLOSED)
        self.engine.close_line(self.line)


def _read_end(run: "Future[AgentEnd]") -> AgentEnd:
    """Return how an agent's run ended; an exception counts as a problem."""
    try:
        return run.result(timeout=0)
    except CancelledError:
        return AgentEnd(None, "the harness was cancelled")
    # A harness is foreign code and may fail in any way.
    except Exception as error:
        return AgentEnd(None, f"{type(error).__name__}: {error}")


def _explain_difference(text: Sequence[int], request: Sequence[int]) -> str:
    """Describe the first difference between the harness's text and the conversation's."""
    pairs = enumerate(zip(text, request, strict=False))
    place = next((place for place, (a, b) in pairs if a != b), min(len(text), len(request)))
    return (
        f"the harness continues a different text: its token {place} of {len(request)} differs from the "
        f"conversation's {len(text)}; it shortens, branches, or uses a different template than the "
        "student's"
    )


class Verifiers(Task):
    """The tasks of a taskset; a harness leads the conversations."""

    def __init__(self, config: Config, runner: VerifiersRunner) -> None:
        self._config = config
        self._runner = runner
        tasks = runner.list_tasks(config.train_size + config.heldout_size)
        if len(tasks) <= config.heldout_size:
            raise DataError(
                f"task.taskset: {config.taskset!r} has {len(tasks)} tasks, and {config.heldout_size} "
                "are held out; write a smaller heldout_size"
            )
        self._prompts = [Prompt(task.name, task.messages) for task in tasks]
        self._indices: dict[str, int] = {}
        for index, task in enumerate(tasks):
            if self._indices.setdefault(task.name, index) != index:
                raise DataError(f"task.taskset: two tasks are called {task.name!r}")
        self._train = min(config.train_size, len(tasks) - config.heldout_size)
        # Conversations may open concurrently.
        self._lock = threading.Lock()
        self._opened: tuple[TokenEngine, Path] | None = None

    def train_prompts(self) -> Sequence[Prompt]:
        """Return the first tasks."""
        return self._prompts[: self._train]

    def heldout_prompts(self) -> Sequence[Prompt]:
        """Return the tasks after them."""
        return self._prompts[self._train : self._train + self._config.heldout_size]

    def open_tokens(
        self, prompt: Prompt, seed: int, save_tokenizer: Callable[[Path], None]
    ) -> HarnessEpisode:
        """Start an agent on the prompt's task, with its own request line to the student."""
        engine, tokenizer = self._prepare(save_tokenizer)
        line = engine.open_line()
        run = self._runner.start(self._indices[prompt.id], line.base_url, tokenizer)
        # The end arrives in the queue of the requests, so one wait sees both.
        run.add_done_callback(line.events.put)
        return HarnessEpisode(engine, line, run, self._config.seconds, self._config.reward_range)

    def _prepare(self, save_tokenizer: Callable[[Path], None]) -> tuple[TokenEngine, Path]:
        """Return the engine and the folder of the tokenizer, made by the first conversation."""
        with self._lock:
            if self._opened is None:
                folder = Path(tempfile.mkdtemp(prefix="practicum-tokenizer-"))
                # Kept until the task is deleted: a harness may read it at any time.
                weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
                save_tokenizer(folder)
                self._opened = TokenEngine(), folder
            return self._opened

    def reward(self, rollout: Rollout) -> float | None:
        """Return the taskset's reward; the smallest reward if the conversation was truncated."""
        rewards = [turn.reward for turn in rollout.turns if turn.reward is not None]
        if rewards:
            return rewards[-1]
        return self._config.reward_range[0] if rollout.stop_reason in ("length", "turns") else None


def build(config: Config, context: TaskContext) -> Task:
    """Load the taskset; DataError on failure, or if its harness may not run programs."""
    runner = open_runner(config.taskset, config.settings, config.harness)
    if runner.executes_code() and not config.runs_code_here:
        raise DataError(
            f"task.harness: {config.harness!r} lets the student run programs on this machine, "
            "without a sandbox; set runs_code_here: true on a machine where that may be, or leave "
            "harness out"
        )
    return Verifiers(config, runner)
