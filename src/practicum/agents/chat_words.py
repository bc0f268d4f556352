"""OpenAI's chat protocol: parse a request into messages, and format a turn as answer or stream."""

import json
import secrets
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from practicum.ports import SampledTurn, TurnRequest
from practicum.types import Message

MAX_MESSAGES = 4096
"""The maximum number of messages in a request."""


class ChatProblem(ValueError):
    """A request that cannot be answered; the text gives the reason."""


class _ContentPart(BaseModel):
    type: Literal["text"]
    text: str


class _ChatMessage(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_ContentPart] | None = None
    name: str | None = None

    def read(self) -> Message:
        """Return the message; the parts of a text are joined."""
        content = self.content
        parts = content if isinstance(content, list) else ()
        text = content if isinstance(content, str) else "".join(part.text for part in parts)
        # Newer clients call the system role "developer".
        role = "system" if self.role == "developer" else self.role
        return Message(role, text, self.name if role == "tool" else None)


class ChatRequest(BaseModel):
    """The used fields of a request; sampling settings are ignored, because the recipe sets them."""

    model_config = ConfigDict(frozen=True)
    model: str | None = None
    messages: Annotated[list[_ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    stream: bool = False
    logprobs: bool | None = None
    n: int | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[Any] | None = None
    stop: str | list[str] | None = None

    def build_turn_request(self) -> TurnRequest:
        """Parse a request; ChatProblem if it needs an unsupported feature."""
        if (self.n or 1) > 1:
            raise ChatProblem("n: one answer is given to a request; ask several times")
        if self.tools:
            raise ChatProblem("tools: this student is served without tools; leave them out")
        if self.stop:
            raise ChatProblem("stop: answers end where the recipe says; leave it out")
        messages = tuple(message.read() for message in self.messages)
        if messages[-1].role not in ("user", "tool"):
            raise ChatProblem("messages: the last one has to be the user's or a tool's")
        return TurnRequest(
            messages=messages, max_tokens=self.max_completion_tokens or self.max_tokens
        )


def read_chat_request(body: bytes, model: str) -> ChatRequest:
    """Return the request of a body; ChatProblem if it is none, or is for another model."""
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        raise ChatProblem(f"{place}: {first['msg']}") from None
    if request.model not in (None, model):
        raise ChatProblem(f"model: there is one here, {model!r}")
    return request


def write_answer(turn: SampledTurn, model: str, *, logprobs: bool) -> dict[str, Any]:
    """Format a turn as a complete answer."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": turn.text},
        "finish_reason": _name_end(turn),
        "logprobs": {"content": list_logprobs(turn)} if logprobs else None,
    }
    before, after = len(turn.before), len(turn.tokens)
    usage = {
        "prompt_tokens": before,
        "completion_tokens": after,
        "total_tokens": before + after,
    }
    return {**_open_answer("chat.completion", model), "choices": [choice], "usage": usage}


def write_stream(turn: SampledTurn, model: str, *, logprobs: bool) -> Iterator[bytes]:
    """Yield the events of a turn as a stream: its text in one piece, then its end."""
    answer = _open_answer("chat.completion.chunk", model)
    delta = {"role": "assistant", "content": turn.text}
    content = {"content": list_logprobs(turn)} if logprobs else None
    parts: list[dict[str, Any]] = [
        {"index": 0, "delta": delta, "finish_reason": None, "logprobs": content},
        {"index": 0, "delta": {}, "finish_reason": _name_end(turn)},
    ]
    for part in parts:
        yield b"data: " + json.dumps({**answer, "choices": [part]}).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


def list_logprobs(turn: SampledTurn) -> list[dict[str, Any]]:
    """Return the sampled tokens by their ids, each with its log-probability."""
    return [
        {"token": f"token_id:{token}", "logprob": value}
        for token, value in zip(turn.tokens, turn.logprobs, strict=True)
    ]


def _name_end(turn: SampledTurn) -> str:
    return "length" if turn.stop_reason == "length" else "stop"


def _open_answer(kind: str, model: str) -> dict[str, Any]:
    name = f"chatcmpl-{secrets.token_hex(8)}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}
