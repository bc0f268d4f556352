"""A question as text: its messages, and what a verifier or a teacher may know about it."""

# Without torch: the process of a verifier imports this module and starts in a fraction of the time.

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation, for example `Message("user", "What is 8 times 7?")`."""

    role: str
    content: str


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
