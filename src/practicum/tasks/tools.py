"""Any task with tool calls in its answers: your functions, Python in a sandbox, an MCP server.

The chat template writes the tools into the student's prompt, and a turn that calls a tool is
answered with the result. A turn without a call is the answer, which the inner task rewards.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from string import printable
from typing import Any, ClassVar, Literal, Protocol

from pydantic import Field, model_validator

from practicum.core.plugins import Plugin, build_part, load_plugin
from practicum.errors import DataError
from practicum.ports import Episode, Task, TaskConfig, TaskContext, ToolSession
from practicum.ports.tasks import ToolProblem
from practicum.rows.answered import Tags, count_tagged, keep_answer, leave_out_calls
from practicum.types import Prompt, Rollout, ToolSchema, ToolUse

KINDS = "practicum.tools"
"""The package with the kinds of tools."""


class Config(TaskConfig):
    """The inner task, its tools, and when a conversation ends."""

    offers_tools: ClassVar[bool] = True
    type: Literal["tools"] = "tools"
    task: Plugin("tasks", TaskConfig) = Field(description="the task that gets tools")  # type: ignore[valid-type]
    tools: tuple[Plugin(KINDS), ...] = Field(  # type: ignore[valid-type]
        min_length=1, description="the tools, each of a type `function`, `interpreter` or `mcp`"
    )
    calls: Literal["auto", "hermes", "xml", "glm", "mistral", "lfm", "pythonic", "json"] = Field(
        default="auto", description="the form of calls; `auto`: the form in the chat template"
    )
    turns: int = Field(
        default=8, ge=1, description="turns with calls after which the conversation ends"
    )
    bad_calls: int = Field(
        default=3, ge=1, description="calls without a result after which the conversation ends"
    )
    characters: int = Field(
        default=2000, ge=1, description="longer results are cut off, and the model is told"
    )
    tags: Tags | None = Field(
        default=None,
        description="texts before and after an answer, as `[<answer>, </answer>]`: the source `resample` "
        "counts them, and the reward is the inner task's",
    )

    @model_validator(mode="after")
    def _check_task(self) -> "Config":
        if self.task.type == self.type:
            raise ValueError("task: tools within tools; write all of them into one list")
        return self


class ToolKind(Protocol):
    """The tools that the file of a kind builds."""

    @property
    def schemas(self) -> Sequence[ToolSchema]:
        """The schemas of the tools; several if they come from one server."""
        ...

    def open(self, seed: int) -> ToolSession:
        """Return the tools for one conversation."""
        ...


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a task; see `practicum.ports.Toolbox`."""

    kinds: Sequence[ToolKind]
    calls: str
    turns: int
    bad_calls: int
    characters: int

    @property
    def use(self) -> ToolUse:
        """The schemas of all tools, in order."""
        schemas = tuple(schema for kind in self.kinds for schema in kind.schemas)
        return ToolUse(schemas, self.calls)

    def open(self, prompt: Prompt, seed: int) -> "ToolsSession":
        """Return a session that opens each kind of tool with its first call."""
        return ToolsSession(self, seed)


@dataclass(slots=True)
class ToolsSession(ToolSession):
    """The tools of one conversation."""

    tools: Tools
    seed: int
    sessions: dict[str, ToolSession] = field(default_factory=dict)
    opened: ExitStack = field(default_factory=ExitStack)

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the result of a call, or raise ToolProblem; truncate long results and reasons."""
        try:
            result = self._find(name).call(name, arguments)
        except ToolProblem as problem:
            raise ToolProblem(problem.outcome, self._cut(str(problem))) from None
        # The caller refuses a result that is not text.
        return self._cut(result) if isinstance(result, str) else result

    def _cut(self, text: str) -> str:
        if len(text) <= self.tools.characters:
            return text
        return f"{text[: self.tools.characters]}... ({len(text)} characters, cut off)"

    def find_part(self, name: str) -> int:
        """Return the identity of the tool's process or server."""
        return id(self._find(name))

    def _find(self, name: str) -> ToolSession:
        if name not in self.sessions:
            kind = next(
                kind
                for kind in self.tools.kinds
                if any(schema.name == name for schema in kind.schemas)
            )
            session = kind.open(self.seed)
            self.opened.callback(session.close)
            self.sessions |= dict.fromkeys((schema.name for schema in kind.schemas), session)
        return self.sessions[name]

    def close(self) -> None:
        """Close every session that was opened."""
        self.opened.close()


@dataclass(frozen=True, slots=True)
class ToolTask(Task):
    """A task with tools; the inner task may reply to the turns without calls."""

    task: Task
    tools: Tools
    tags: Tags | None

    @property
    def toolbox(self) -> Tools:
        """The tools."""
        return self.tools

    @property
    def opens_episodes(self) -> bool:
        """Return True if the inner task replies."""
        return self.task.opens_episodes

    @property
    def letters(self) -> str:
        """The inner task's letters and all of ASCII: a tool may return any text."""
        return "".join(sorted({*self.task.letters, *printable.strip(), " "}))

    def train_prompts(self) -> Sequence[Prompt]:
        """Return the inner task's training prompts."""
        return self.task.train_prompts()

    def heldout_prompts(self) -> Sequence[Prompt]:
        """Return the inner task's held-out prompts."""
        return self.task.heldout_prompts()

    def reward(self, rollout: Rollout) -> float | None:
        """Return the inner task's reward of the answer."""
        return self.task.reward(self._keep_answer(rollout))

    def count_answers(self, rollout: Rollout) -> int | None:
        """Return how often the answer is stated between tags; None without tags."""
        return count_tagged(rollout, self.tags)

    def feedback(self, rollout: Rollout) -> str | None:
        """Return the inner task's feedback on the answer."""
        return self.task.feedback(self._keep_answer(rollout))

    def _keep_answer(self, rollout: Rollout) -> Rollout:
        """Return the turns without calls if the inner task converses, else only the last turn."""
        return leave_out_calls(rollout) if self.opens_episodes else keep_answer(rollout)

    def open(self, prompt: Prompt, seed: int) -> Episode:
        """Begin the inner task's conversation."""
        return self.task.open(prompt, seed)


def build(config: Config, context: TaskContext) -> Task:
    """Build the inner task and start its tools; DataError if two tools share a name."""
    task = build_part("tasks", Task, config.task, context)
    kinds = [load_plugin(KINDS, tool.type).build(tool) for tool in config.tools]
    toolbox = Tools(kinds, config.calls, config.turns, config.bad_calls, config.characters)
    names = [schema.name for schema in toolbox.use.schemas]
    # A model calls a tool only by its name.
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"task.tools: two tools are called {twice[0]!r}; rename one of them")
    return ToolTask(task, toolbox, config.tags)
