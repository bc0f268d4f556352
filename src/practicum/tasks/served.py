"""Users who chat with the student while it learns, over the chat protocol (OpenClaw-RL 2603.10165).

Use it with `rollout.source: served`. The inner task has the held-out prompts. Only a user can judge
a served turn, so served turns have no reward.
"""

import logging
import queue
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from practicum.agents.token_engine import MODEL, TokenEngine
from practicum.core.access import TOKEN_VARIABLE, Admission, name_place, read_admission
from practicum.core.plugins import Plugin, build_part
from practicum.errors import DataError, ResourceError
from practicum.ports import Task, TaskConfig, TaskContext, TurnRequest
from practicum.types import Prompt, Rollout

log = logging.getLogger(__name__)


class Config(TaskConfig):
    """The inner task, and where users find the student."""

    type: Literal["served"] = "served"
    task: Plugin("tasks", TaskConfig) = Field(  # type: ignore[valid-type]
        description="the task with the held-out prompts; plan and doctor use its training prompts"
    )
    host: str = Field(
        default="127.0.0.1",
        description="address to listen on; other than this machine's needs a token",
    )
    port: int = Field(default=8000, ge=0, le=65535, description="0: any free port")
    token_file: Path | None = Field(
        default=None,
        description=f"a file of mode 0600 with the token; else {TOKEN_VARIABLE} has it",
    )
    seconds: float = Field(
        default=3600.0, gt=0, description="the run ends after this time without a request"
    )


@dataclass(slots=True)
class ServedTask(Task):
    """A task with users."""

    config: Config
    task: Task
    admission: Admission
    known: frozenset[str]
    """The names of the inner task's prompts."""
    engine: TokenEngine | None = None

    @property
    def letters(self) -> str:
        """The inner task's letters."""
        return self.task.letters

    @property
    def patience(self) -> float:
        """The longest silence."""
        return self.config.seconds

    def train_prompts(self) -> Sequence[Prompt]:
        """Return the inner task's training prompts, which no served step trains on."""
        return self.task.train_prompts()

    def heldout_prompts(self) -> Sequence[Prompt]:
        """Return the inner task's held-out prompts."""
        return self.task.heldout_prompts()

    def reward(self, rollout: Rollout) -> float | None:
        """Return the inner task's reward; it is not called for served turns."""
        return self.task.reward(rollout) if rollout.prompt.id in self.known else None

    def feedback(self, rollout: Rollout) -> str | None:
        """Return the inner task's feedback."""
        return self.task.feedback(rollout) if rollout.prompt.id in self.known else None

    def receive(self, seconds: float) -> list[TurnRequest]:
        """Return the waiting requests; the first call opens the endpoint."""
        line = (self.engine or self._open()).users
        requests: list[TurnRequest] = []
        try:
            while event := line.events.get(timeout=0 if requests else seconds):
                assert isinstance(event, TurnRequest), "the users' queue holds only requests"
                requests.append(event)
        except queue.Empty:
            pass
        return requests

    def close(self) -> None:
        """Refuse waiting requests, and close the endpoint."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def _open(self) -> TokenEngine:
        """Open the endpoint and log its address; ResourceError if the address is in use."""
        host, port = self.config.host, self.config.port
        try:
            engine = TokenEngine(host, port, self.admission, serves_users=True)
        except OSError as error:
            raise ResourceError(
                f"{name_place(host, port)} cannot be served on ({error.strerror}); write another "
                "task.port or task.host"
            ) from error
        self.engine = engine
        log.info(f"{MODEL} answers at {engine.users.base_url}/chat/completions")
        return engine


def build(config: Config, context: TaskContext) -> Task:
    """Build the inner task; DataError if it converses, RecipeError if access is not restricted."""
    task = build_part("tasks", Task, config.task, context)
    if task.converses:
        raise DataError(
            f"task.task: {config.task.type!r} replies to its answers itself; take a task of single "
            "answers for the held-out prompts"
        )
    path = None if config.token_file is None else context.base_dir / config.token_file.expanduser()
    admission = read_admission(config.host, path, "task.host:", "task.token_file:")
    prompts = [*task.train_prompts(), *task.heldout_prompts()]
    return ServedTask(config, task, admission, frozenset(prompt.id for prompt in prompts))
