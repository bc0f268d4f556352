"""A teacher that replies to messages and scores nothing: its text, in the student's tokens."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import Field

from practicum.costs import Meter
from practicum.errors import DataError, TeacherError
from practicum.objective import Signal
from practicum.ports import (
    Capabilities,
    PromptedClient,
    SamplingClient,
    Teacher,
    TeacherRequest,
)
from practicum.remote.http import JsonRequest
from practicum.teaching.chat_protocols import ChatAnswer, ChatProtocol
from practicum.teaching.client import SilentTeacher
from practicum.teaching.dialects import ServerCompletion
from practicum.teaching.remote import ServerGenerator, refuse_other_form
from practicum.teaching.stored_answers import AnswerStore, build_key
from practicum.text import Renderer, refuse_stop_texts
from practicum.types import (
    FrozenConfig,
    Message,
    Prompt,
    Sample,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    TeacherSignal,
)

CALL_ID = "call{:05}"
"""The id of a call from its number in the conversation; some servers require nine characters."""
TURN_BYTES = 64
"""Tokens that a server's template may add to a turn, rounded up."""


class TokenPrices(FrozenConfig):
    """Prices per million tokens, in the currency of the budget."""

    input: float = Field(ge=0, description="price per million tokens that the model reads")
    output: float = Field(ge=0, description="price per million tokens that the model writes")

    def compute(self, input_tokens: float, output_tokens: float) -> float:
        """Return the price of these numbers of tokens."""
        return (self.input * input_tokens + self.output * output_tokens) / 1e6


FREE = TokenPrices(input=0.0, output=0.0)


@dataclass(slots=True)
class ChatCounts:
    """The counts of a run: answers that were requested, found on disk, and refused."""

    requests: int = 0
    hits: int = 0
    refusals: int = 0


@dataclass(frozen=True, slots=True)
class ChatServer:
    """A server that replies to messages, and its stored answers.

    With `reuses`, answers are stored by prompt, so that a repeated prompt is not sent again;
    otherwise by seed, so that only a resumed run finds them. `budget` is the maximum total price of
    the stored answers.
    """

    generator: ServerGenerator
    protocol: ChatProtocol
    store: AnswerStore | None = None
    reuses: bool = False
    prices: TokenPrices = FREE
    budget: float | None = None
    counts: ChatCounts = field(default_factory=ChatCounts)

    def reply(
        self,
        conversations: Sequence[Sequence[Message]],
        seeds: Sequence[int],
        params: SamplingParams,
    ) -> list[Sample]:
        """Return one reply to each conversation; a refused reply is a failed sample."""
        generator = self.generator
        refuse_stop_texts(params, generator.http.address)
        requests = [
            self.protocol.build_request(generator.model, list_turns(messages), seed, params)
            for messages, seed in zip(conversations, seeds, strict=True)
        ]
        keys = list(self._list_keys(requests, seeds))
        answers = {} if self.store is None else self._find_answers(keys)
        missing = {key: n for n, key in enumerate(keys) if key not in answers}
        self.counts.requests += len(keys)
        self.counts.hits += len(keys) - len(missing)
        with generator.counting("sample"):
            # Answers that arrived are stored even if a later request of this call fails.
            for group in self._split(list(missing.items())):
                answers |= self._ask(group, requests, len(keys), params)
        samples = [
            self._build_sample(answers[key], params, messages)
            for key, messages in zip(keys, conversations, strict=True)
        ]
        count_written(generator.meter, generator.renderer, conversations, samples)
        return samples

    def _list_keys(self, requests: Sequence[JsonRequest], seeds: Sequence[int]) -> Iterator[str]:
        """Yield the key of each answer: equal requests of one call are numbered."""
        counts: Counter[str] = Counter()
        for request, seed in zip(requests, seeds, strict=True):
            # The seed only selects another answer to the same prompt, so it is not a part of the
            # prompt.
            body = {name: value for name, value in (request.body or {}).items() if name != "seed"}
            parts = {"address": self.generator.http.address, "path": request.path, "body": body}
            prompt = build_key(parts)
            number = counts[prompt] if self.reuses else seed
            counts[prompt] += 1
            yield build_key({"prompt": prompt, "number": number})

    def _find_answers(self, keys: Sequence[str]) -> dict[str, ChatAnswer]:
        assert self.store is not None, "the caller has checked the store"
        answers = {key: self.store.get(key) for key in keys}
        return {key: answer for key, answer in answers.items() if answer is not None}

    def _split(self, missing: Sequence[tuple[str, int]]) -> Iterator[Sequence[tuple[str, int]]]:
        """Yield the missing answers: all at once, or with a budget in groups of `concurrency`."""
        size = self.generator.limits.concurrency if self.budget is not None else len(missing)
        for start in range(0, len(missing), max(size, 1)):
            yield missing[start : start + size]

    def _ask(
        self,
        group: Sequence[tuple[str, int]],
        requests: Sequence[JsonRequest],
        total: int,
        params: SamplingParams,
    ) -> dict[str, ChatAnswer]:
        """Send the requests and store each answer as soon as it arrives."""
        limits, http = self.generator.limits, self.generator.http
        most = [_count_input_bound(requests[number]) for _, number in group]
        self._check_budget(sum(self.prices.compute(n, params.max_new_tokens) for n in most), group)
        named = [
            limits.add_timeout(
                _name(requests[number], f"answer {number + 1} of {total}"), params.max_new_tokens
            )
            for _, number in group
        ]

        def read(index: int, content: Any) -> ChatAnswer:
            with refuse_other_form(http, named[index]):
                answer = self.protocol.parse_answer(content)
            if self.store is not None:
                # Without the server's own count, the upper bound is charged.
                money = self.prices.compute(
                    most[index] if answer.input_tokens is None else answer.input_tokens,
                    params.max_new_tokens if answer.output_tokens is None else answer.output_tokens,
                )
                self.store.add(group[index][0], answer, money)
            return answer

        answers = http.send_all(named, read)
        return {key: answer for (key, _), answer in zip(group, answers, strict=True)}

    def _check_budget(self, most: float, group: Sequence[tuple[str, int]]) -> None:
        """Raise TeacherError if the next answers may cost more than the rest of the budget."""
        if self.budget is None:
            return
        assert self.store is not None, "a budget counts the answers of a store"
        if self.store.money + most > self.budget:
            raise TeacherError(
                f"{self.generator.http.address}: the answers so far cost {self.store.money:.4g}, "
                f"and the next {len(group)} may cost {most:.4g}, more than teacher.budget, "
                f"{self.budget:.4g}; raise it and resume: paid answers are kept"
            )

    def _build_sample(
        self, answer: ChatAnswer, params: SamplingParams, messages: Sequence[Message]
    ) -> Sample:
        if not answer.is_refused:
            completion = ServerCompletion(answer.text, answer.is_stopped, messages=messages)
            return self.generator.build_sample(completion, params)
        self.counts.refusals += 1
        return build_failed_sample(params)


class ChatTeacher(SilentTeacher):
    """A teacher that replies to messages and scores nothing; see `practicum.ports.Teacher`.

    The server renders the messages with its own template.
    """

    def __init__(self, server: ChatServer, capabilities: Capabilities, system: str | None) -> None:
        self._server = server
        self._capabilities = capabilities
        self._system = system

    @property
    def capabilities(self) -> Capabilities:
        """No signal, but completions."""
        return self._capabilities

    def sample(self, requests: Sequence[TeacherRequest], params: SamplingParams) -> list[Sample]:
        """Return the server's replies in the student's tokens."""
        conversations = [self._add_system(request.prompt.messages) for request in requests]
        return self._server.reply(conversations, [request.seed for request in requests], params)

    def _add_system(self, messages: Sequence[Message]) -> Sequence[Message]:
        if not self._system or any(message.role == "system" for message in messages):
            return messages
        return (Message("system", self._system), *messages)

    def bind_prompt(self, prompt: Prompt) -> PromptedClient:
        """Return the server as a client of this prompt only."""
        prompt_tokens = self._server.generator.renderer.render(prompt.messages)
        return PromptedClient(PromptWriter(self, prompt), prompt_tokens, accepts_tokens=False)


@dataclass(frozen=True, slots=True)
class PromptWriter(SamplingClient):
    """A text-only teacher as a client of one prompt; it never sees the prompt's tokens."""

    teacher: Teacher
    prompt: Prompt

    @property
    def capabilities(self) -> Capabilities:
        """No signal, but completions."""
        return self.teacher.capabilities

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """Sample one reply for each seed."""
        teacher_requests = [TeacherRequest(self.prompt, request.seed) for request in requests]
        samples = self.teacher.sample(teacher_requests, params)
        assert samples is not None, "a text-only teacher must be able to write"
        return samples

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """Return an empty signal for each request."""
        return [TeacherSignal() for _ in requests]


@dataclass(frozen=True, slots=True)
class PaperWriter(SilentTeacher):
    """A teacher for a plan: it sends no requests, and its answers have the maximum length."""

    declared: Capabilities
    renderer: Renderer
    meter: Meter | None

    @property
    def capabilities(self) -> Capabilities:
        """No signal, but completions."""
        return self.declared

    def sample(self, requests: Sequence[TeacherRequest], params: SamplingParams) -> list[Sample]:
        """Return answers of zeros."""
        zeros = torch.zeros(params.max_new_tokens)
        samples = [Sample(zeros.long(), zeros, zeros, "length") for _ in requests]
        prompts = [request.prompt.messages for request in requests]
        count_written(self.meter, self.renderer, prompts, samples)
        return samples


def count_written(
    meter: Meter | None,
    renderer: Renderer,
    conversations: Sequence[Sequence[Message]],
    samples: Sequence[Sample],
) -> None:
    """Count the tokens read and written, in the student's tokens."""
    if meter is not None:
        prompts = renderer.render_all(conversations)
        lengths = [len(sample.tokens) for sample in samples]
        meter.count_sampled(list(zip(prompts, lengths, strict=True)))


def build_failed_sample(params: SamplingParams) -> Sample:
    """Return the sample of an answer that was refused: one stop token, which has no loss."""
    stop = min(params.stop_ids, default=0)
    unknown = torch.full((1,), math.nan)
    return Sample(torch.tensor([stop]), torch.zeros(1), unknown, "error")


def list_turns(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Convert messages to the servers' form: calls with ids, and arguments as JSON texts.

    The results of tools follow their calls in order. DataError if a turn has a picture.
    """
    if any(message.images for message in messages):
        raise DataError(
            "a prompt has pictures or sounds, and only texts are sent to a chat server; take a local teacher"
        )
    turns = [message.to_json() for message in messages]
    called = results = 0
    for turn in turns:
        if calls := turn.get("tool_calls", []):
            results, called = called, called + len(calls)
        for number, call in enumerate(calls, start=results):
            function = call["function"]
            call["id"] = CALL_ID.format(number)
            call["function"] = {**function, "arguments": json.dumps(function["arguments"])}
        if turn["role"] == "tool":
            turn["tool_call_id"] = CALL_ID.format(results)
            results += 1
    return turns


def _name(request: JsonRequest, name: str) -> JsonRequest:
    return JsonRequest(
        request.path, request.body, name, request.seconds, request.max_answer_bytes, request.headers
    )


def _count_input_bound(request: JsonRequest) -> int:
    """Return an upper bound of the tokens in a request's messages: one token per byte."""
    # A byte tokenizer has one token per byte, and no tokenizer has more.
    body = request.body or {}
    turns = [*body["messages"], {"content": body.get("system", "")}]
    return sum(len(turn["content"].encode()) + TURN_BYTES for turn in turns)
