"""Two chat protocols: OpenAI's chat completions and Anthropic's messages.

Each builds the body of a request and parses the answer with its billed tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from practicum.errors import DataError, RecipeError
from practicum.remote.http import JsonRequest
from practicum.types import SamplingParams

ProtocolName = Literal["openai", "anthropic"]

BYTES_A_TOKEN = 64
"""Bytes of JSON for one token of an answer, rounded up."""

PROTOCOL_BYTES = 1 << 18
"""Bytes of an answer without its text, rounded up."""

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The reply to messages, and the tokens that the server bills.

    A refused reply has been written by the server's policy and not by its model, or by a model that
    declines. The counts are None if the server does not return them.
    """

    text: str
    is_stopped: bool
    is_refused: bool = False
    input_tokens: int | None = None
    output_tokens: int | None = None


class ChatProtocol(Protocol):
    """A way of sending messages; `key_header` is as for `practicum.remote.http.Server`."""

    key_header: str | None

    def build_request(
        self, model: str, messages: Messages, seed: int, params: SamplingParams
    ) -> JsonRequest:
        """Return the request for a reply to the messages."""
        ...

    def parse_answer(self, answer: Any) -> ChatAnswer:
        """Return the reply.

        LookupError, TypeError, ValueError or AttributeError if the answer has another form.
        """
        ...


class OpenAIProtocol:
    """`/v1/chat/completions`, as most servers implement it."""

    key_header: str | None = None

    def build_request(
        self, model: str, messages: Messages, seed: int, params: SamplingParams
    ) -> JsonRequest:
        """Build the request with a seed of 31 bits, the most that these servers read."""
        # No token is banned: the ids of the student's vocabulary mean other tokens there.
        body = {
            "model": model,
            "messages": [dict(message) for message in messages],
            "max_tokens": params.max_new_tokens,
            "seed": seed % 2**31,
            "temperature": params.temperature,
            "top_p": params.top_p,
        }
        return _build_request("/v1/chat/completions", body, params)

    def parse_answer(self, answer: Any) -> ChatAnswer:
        """Read a refusal from its field, or from the filter that ended the reply.

        A reply without text that calls a tool, or that ended in an unknown way, counts as refused.
        """
        choice = answer["choices"][0]
        message, reason = choice["message"], choice["finish_reason"]
        usage = answer.get("usage") or {}
        text = _join_parts(message.get("content"))
        calls = message.get("tool_calls") or message.get("function_call")
        is_silent = not text and (bool(calls) or reason not in ("stop", "length"))
        return ChatAnswer(
            text=text,
            is_stopped=reason == "stop",
            is_refused=bool(message.get("refusal")) or reason == "content_filter" or is_silent,
            input_tokens=_read_count(usage.get("prompt_tokens")),
            output_tokens=_read_count(usage.get("completion_tokens")),
        )


class AnthropicProtocol:
    """`/v1/messages`: a separate system turn, no seed, temperatures up to 1."""

    key_header: str | None = "x-api-key"

    def build_request(
        self, model: str, messages: Messages, seed: int, params: SamplingParams
    ) -> JsonRequest:
        """Send the system turn as a field; RecipeError for a temperature above 1."""
        if params.temperature > 1.0:
            raise RecipeError(
                f"a temperature of {params.temperature:g}: this protocol knows temperatures from 0 "
                "to 1; set rollout.source: teacher(temperature=1.0), or evaluation.temperature"
            )
        systems = [turn["content"] for turn in messages if turn["role"] == "system"]
        turns = [
            {"role": turn["role"], "content": turn["content"]}
            for turn in messages
            if turn["role"] != "system"
        ]
        if any(turn["role"] == "tool" for turn in messages):
            raise DataError(
                "a prompt has results of tools, which this protocol only takes with the tools "
                "themselves; leave such rows out, or take a teacher with the protocol `openai`"
            )
        body: dict[str, Any] = {
            "model": model,
            "messages": turns,
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
        }
        # Some models refuse a request with both top_p and top_k, so inactive values are left out.
        body |= {"system": "\n\n".join(systems)} if systems else {}
        body |= {"top_p": params.top_p} if params.top_p < 1.0 else {}
        body |= {"top_k": params.top_k} if params.top_k else {}
        headers = {"anthropic-version": "2023-06-01"}
        return _build_request("/v1/messages", body, params, headers)

    def parse_answer(self, answer: Any) -> ChatAnswer:
        """Join the blocks of text; blocks of thinking and of tools are not part of the reply.

        A reply without text that uses a tool, or that ended in an unknown way, counts as refused.
        """
        kinds = [block["type"] for block in answer["content"]]
        texts = [block["text"] for block in answer["content"] if block["type"] == "text"]
        text = "".join(map(_require_text, texts))
        reason, usage = answer["stop_reason"], answer.get("usage") or {}
        ends = ("end_turn", "stop_sequence", "max_tokens")
        is_silent = not text and ("tool_use" in kinds or reason not in ends)
        return ChatAnswer(
            text=text,
            is_stopped=reason in ("end_turn", "stop_sequence"),
            is_refused=reason == "refusal" or is_silent,
            input_tokens=_read_count(usage.get("input_tokens")),
            output_tokens=_read_count(usage.get("output_tokens")),
        )


PROTOCOLS: dict[ProtocolName, ChatProtocol] = {
    "openai": OpenAIProtocol(),
    "anthropic": AnthropicProtocol(),
}
"""The protocols by their names in a recipe."""


def _build_request(
    path: str,
    body: Mapping[str, Any],
    params: SamplingParams,
    headers: Mapping[str, str] | None = None,
) -> JsonRequest:
    largest = PROTOCOL_BYTES + params.max_new_tokens * BYTES_A_TOKEN
    return JsonRequest(path, body, max_answer_bytes=largest, headers=headers or {})


def _join_parts(content: Any) -> str:
    """Return the text of a reply: a text, the texts of its parts joined, or nothing.

    Parts of thinking are not part of the reply. Raises TypeError or ValueError for anything else,
    such as a picture.
    """
    if content is None:
        return ""
    if not isinstance(content, list):
        return _require_text(content)
    texts: list[str] = []
    for part in content:
        kind = part["type"]
        if kind == "text":
            texts.append(_require_text(part["text"]))
        elif kind not in ("thinking", "reasoning"):
            raise ValueError(f"a part of type {kind!r}, which is no text")
    return "".join(texts)


def _require_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} instead of a text")
    return value


def _read_count(value: Any) -> int | None:
    """Return a number of tokens, or None for anything else."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if is_count else None
