"""Questions and conversations as text: messages, turns, and what others may know about a question."""

# Without torch: the process of a verifier imports this module and starts in a fraction of the time.

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation, for example `Message("user", "What is 8 times 7?")`.

    `name` is the tool whose result this is, in a turn of the role `tool`. `tokens` are those by which
    it made a stored conversation longer, with what the template wrote around it.
    """

    role: str
    content: str
    name: str | None = None
    tokens: tuple[int, ...] = ()


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

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Prompt":
        """Return the prompt of the fields that `dataclasses.asdict` gives, read back from JSON."""
        messages = tuple(
            Message(**{**message, "tokens": tuple(message.get("tokens", ()))})
            for message in fields["messages"]
        )
        return cls(**{**fields, "messages": messages})


CallOutcome = Literal["answered", "unreadable", "unknown", "invalid", "failed", "timeout"]
"""The end of a call: a result, or why there is none. It could not be read, named no tool, or had
arguments that the tool does not take; or the tool failed, or took too long."""


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One call of a tool: the tool's name as the model wrote it, and the outcome."""

    tool: str
    outcome: CallOutcome


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a rollout's conversation: its role (as in `Message`), token count and text.

    The tokens of an environment's turn include the chat template's tokens around its text. A turn
    of the model has the `calls` that it made, and the `reward` that the environment gave for it.
    """

    role: str
    tokens: int
    text: str
    calls: tuple[CallRecord, ...] = ()
    reward: float | None = None
