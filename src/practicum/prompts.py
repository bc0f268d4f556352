"""A question as text: its messages, and what a verifier or a teacher may know about it."""

# Without torch: the process of a verifier imports this module and starts in a fraction of the time.

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation, for example `Message("user", "What is 8 times 7?")`.

    `name` is the tool whose result this is, in a turn of the role `tool`.
    """

    role: str
    content: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A tool as a chat template shows it: a name, what it does, and a JSON Schema of arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any] = field(hash=False)

    def to_json(self) -> dict[str, Any]:
        """Return the schema in the words of chat templates."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that a model may call, and the form of its calls: see `practicum.text.tool_calls`."""

    schemas: tuple[ToolSchema, ...]
    calls: str = "auto"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model wrote: data, which nothing has checked."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question as text, as a task yields it, before tokenization.

    A verifier compares with `answer`. `response` is a full worked solution to imitate; without it,
    `answer` is imitated. `privileged` holds the fields that only a teacher may see (a solution, a
    hint, a document). `domain` labels the prompt in reports, `teacher` routes it to a teacher.
    """

    id: str
    messages: tuple[Message, ...]
    answer: str | None = None
    response: str | None = None
    domain: str | None = None
    teacher: str | None = None
    privileged: Mapping[str, str] = field(default_factory=dict)

    @property
    def question(self) -> str:
        """The user's last message, empty without one."""
        questions = (turn.content for turn in reversed(self.messages) if turn.role == "user")
        return next(questions, "")
