"""Questions and conversations as text: messages, turns, and additional information about a
question.
"""

# Without torch: the process of a verifier imports this module and starts in a fraction of the time.

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that a model wrote. Nothing has checked the name or the arguments."""

    name: str
    arguments: Mapping[str, Any] = field(hash=False)

    def to_json(self) -> dict[str, Any]:
        """Return the call in the format of chat templates and servers."""
        return {
            "type": "function",
            "function": {"name": self.name, "arguments": dict(self.arguments)},
        }


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation, for example `Message("user", "What is 8 times 7?")`.

    `name` is the tool that returned this result, in a turn of the role `tool`. `tokens` are the tokens
    that the turn added to a stored conversation, including the template's text around it. An
    assistant's turn may have `reasoning`, the thoughts before its text, and `tool_calls`. `reasoning`
    is None if the thoughts are unknown or part of the text, for example between `<think>` and
    `</think>`. `images` are the pictures and sounds of a user's turn, each a path or a `data:` URL, in
    the order of the `<image>` and `<audio>` in its text (see `practicum.pictures`).
    """

    role: str
    content: str
    name: str | None = None
    tokens: tuple[int, ...] = ()
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    images: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the turn in the format of rows of `messages`, without its tokens and pictures."""
        calls = [call.to_json() for call in self.tool_calls]
        return {
            "role": self.role,
            "content": self.content,
            **({} if self.name is None else {"name": self.name}),
            **({} if self.reasoning is None else {"reasoning_content": self.reasoning}),
            **({"tool_calls": calls} if calls else {}),
        }

    @classmethod
    def from_saved(cls, fields: Mapping[str, Any]) -> "Message":
        """Return the message of the fields that `dataclasses.asdict` gives, read back from JSON."""
        calls = tuple(ToolCall(**call) for call in fields.get("tool_calls", ()))
        lists = {name: tuple(fields.get(name, ())) for name in ("tokens", "images")}
        return cls(**{**fields, **lists, "tool_calls": calls})


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A tool as a chat template shows it: a name, what it does, and a JSON Schema of arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any] = field(hash=False)

    def to_json(self) -> dict[str, Any]:
        """Return the schema in the format of chat templates."""
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
class Prompt:
    """A question as text, as a task yields it, before tokenization.

    A verifier compares with `answer`. `response` is a full worked solution to imitate; without it,
    `answer` is imitated. `reasoning` are the thoughts before the response, if they are known
    separately from its text. `privileged` holds the fields that only a teacher may see (a solution,
    a hint, a document). `domain` labels the prompt in reports, `teacher` routes it to a teacher.
    """

    id: str
    messages: tuple[Message, ...]
    answer: str | None = None
    response: str | None = None
    domain: str | None = None
    teacher: str | None = None
    privileged: Mapping[str, str] = field(default_factory=dict)
    reasoning: str | None = None

    @property
    def question(self) -> str:
        """The user's last message, empty without one."""
        questions = (turn.content for turn in reversed(self.messages) if turn.role == "user")
        return next(questions, "")

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Prompt":
        """Return the prompt of the fields that `dataclasses.asdict` gives, read back from JSON."""
        messages = tuple(map(Message.from_saved, fields["messages"]))
        return cls(**{**fields, "messages": messages})


CallOutcome = Literal["answered", "unreadable", "unknown", "invalid", "failed", "timeout"]
"""The outcome of a tool call: a result, or the reason for its absence. The call could not be read,
named an unknown tool or had invalid arguments; or the tool failed or timed out.
"""


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
