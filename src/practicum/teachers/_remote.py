"""A server as a scorer: each completion one request, every answer checked, its model recognised again and again."""

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from practicum.costs import Meter, Phase
from practicum.errors import ResourceError, TeacherError
from practicum.objective import Signal
from practicum.ports import Capabilities, PromptedClient, StepFollower, Teacher, TeacherRequest
from practicum.remote.http import JsonClient, JsonRequest
from practicum.teachers._checks import MOST, is_token, validate_scores
from practicum.teachers._dialects import (
    Dialect,
    ServerCompletion,
    answered_by,
    build_chat_request,
    parse_chat_completion,
)
from practicum.teachers._probe import Probe, difference, served
from practicum.text import Renderer, refuse_stop_texts
from practicum.types import (
    Message,
    Prompt,
    Rollout,
    Sample,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    TeacherSignal,
)

T = TypeVar("T")

MOST_LIFTED = 1e-3
"""The largest share of log-probabilities that may have been minus infinity."""

FEW = 10
"""So many are allowed whatever their share."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What may be asked of a server: seconds a request besides those for its tokens, and tokens to be scored in all."""

    seconds: float = 30.0
    tokens_per_second: float = 50.0
    concurrency: int = 16
    token_budget: int | None = None
    canary_every: int = 16

    def with_timeout(self, question: JsonRequest, tokens: int) -> JsonRequest:
        """The question with the time that its tokens, and those that are answered beside it, may take."""
        return replace(
            question, seconds=self.seconds + self.concurrency * tokens / self.tokens_per_second
        )


@dataclass(frozen=True, slots=True)
class ServerGenerator:
    """Has a server write answers, and turns them into the student's tokens; `meter` counts the bytes."""

    http: JsonClient
    model: str
    renderer: Renderer
    limits: ServerLimits
    meter: Meter | None = None

    @contextlib.contextmanager
    def counting(self, phase: Phase) -> Iterator[None]:
        """Count the bytes that go out and come back within the block, whatever becomes of them."""
        before = self.http.wire_bytes
        try:
            yield
        finally:
            if self.meter is not None:
                self.meter.sent(phase, self.http.wire_bytes - before)

    def asked(
        self,
        questions: Sequence[JsonRequest],
        read: Callable[[Any], ServerCompletion],
        params: SamplingParams,
    ) -> list[Sample]:
        """The answers to questions, in their order."""
        refuse_stop_texts(params, self.http.address)
        named = [
            replace(question, name=f"answer {number} of {len(questions)}")
            for number, question in enumerate(questions, start=1)
        ]
        with self.counting("sample"):
            answers = self.http.send_all(
                [self.limits.with_timeout(question, params.max_new_tokens) for question in named]
            )
        return [
            self._sample(_read(self.http, question, read, answer), params)
            for question, answer in zip(named, answers, strict=True)
        ]

    def _sample(self, written: ServerCompletion, params: SamplingParams) -> Sample:
        """The answer as a sample; log-probabilities that nobody knows are 0 for the sampler and NaN for the policy."""
        limit, stops = params.max_new_tokens, params.stop_ids
        if written.tokens is None:
            # JSON can hold half of a surrogate pair, which is no character.
            text = written.text.encode("utf-8", "replace").decode("utf-8")
            tokens = self.renderer.encode_answer(text, limit)
            tokens = (
                tokens
                if written.stopped or not tokens or tokens[-1] not in stops
                else tokens[:-1] or tokens
            )
        else:
            if not isinstance(written.tokens, list):
                raise self._unreadable("no list of token ids")
            tokens = written.tokens[:limit]
            if not all(map(is_token, tokens)):
                raise self._unreadable("what is no token id")
            if written.stopped and (not tokens or tokens[-1] not in stops) and len(tokens) < limit:
                tokens.append(written.stop_token if written.stop_token in stops else min(stops))
        if not tokens:
            raise self._unreadable("no token")
        own = (
            written.logprobs
            if isinstance(written.logprobs, list) and len(written.logprobs) == len(tokens)
            else None
        )
        known = own is not None and all(isinstance(v, int | float) and -MOST <= v <= 0 for v in own)
        logprobs = torch.tensor(own, dtype=torch.float32) if known else torch.zeros(len(tokens))
        policy = (
            logprobs.clone()
            if known and params.temperature == 1.0
            else torch.full((len(tokens),), math.nan)
        )
        ends = tokens[-1] in stops
        return Sample(
            torch.tensor(tokens, dtype=torch.long), logprobs, policy, "stop" if ends else "length"
        )

    def _unreadable(self, content: str) -> TeacherError:
        return TeacherError(
            f"{self.http.address}: an answer holds {content}; look at the server's log"
        )


class RemoteClient(StepFollower):
    """Scores and writes through a server; see `practicum.ports.SamplingClient`.

    Errors are TeacherErrors: a server that gives up, an answer that cannot be right, a model that is not the one of the
    start. Its own state, `save_state`, is the canary of the start and the number of tokens that were scored.
    """

    def __init__(
        self,
        speaker: ServerGenerator,
        probe: Probe,
        dialect: Dialect,
        capabilities: Capabilities,
        vocabulary: int,
    ) -> None:
        assert probe.canary is not None, "a probe that found a dialect has scored the canary"
        self._speaker = speaker
        self._http = speaker.http
        self._probe = probe
        self._dialect = dialect
        self.capabilities = capabilities
        """What the server can answer, as far as the recipe lets it be asked."""
        self._vocabulary = vocabulary
        self._canary = probe.canary
        self._calls = 0
        self.spent = self.scored = self.lifted = 0

    def _is_same(self, canary: Tensor) -> bool:
        """Whether a canary of another time is the same model's."""
        return (
            canary.shape == self._canary.shape
            and difference(canary, self._canary) <= self._probe.tolerance
        )

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """The log-probabilities of each request's tokens, and the likeliest k where the signal asks for them."""
        with self._speaker.counting("score"):
            return self._scored(requests, signal)

    def _scored(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        k = min(signal.candidates, self._vocabulary)
        asked = [(number, request) for number, request in enumerate(requests) if request.tokens]
        tokens = sum(len(request.prompt_tokens) + len(request.tokens) for _, request in asked)
        for _, request in asked:
            self._check_room(request)
        if asked:
            self._check_budget(tokens)
            if self._calls and self._calls % self._speaker.limits.canary_every == 0:
                self.check_same_model()
            self._calls += 1
        questions = [
            self._question(f"completion {number + 1} of {len(requests)}", request, k)
            for number, request in asked
        ]
        failures = self._http.failures
        # Each answer is read as it comes: as JSON, all of them together would take many times the memory.
        answers = self._http.send_all(
            questions,
            lambda place, answer: self._signal(questions[place], asked[place][1], answer, k),
        )
        if self._http.failures != failures:
            self.check_same_model()  # it may have been started again with something else
        signals = [TeacherSignal(logprobs=torch.zeros(0))] * len(requests)
        for (number, _), answer in zip(asked, answers, strict=True):
            signals[number] = answer
        self.spent += tokens
        return signals

    def _question(self, name: str, request: ScoreRequest, k: int) -> JsonRequest:
        question = replace(self._dialect.scoring(self._probe.model, request, k), name=name)
        return self._speaker.limits.with_timeout(
            question, len(request.prompt_tokens) + len(request.tokens)
        )

    def _signal(
        self, question: JsonRequest, request: ScoreRequest, answer: Any, k: int
    ) -> TeacherSignal:
        name, before = answered_by(answer), self._probe.answered_by
        if name != before:
            raise TeacherError(
                f"{self._http.address}: the server's model changed since the start: {question.name} was answered by "
                f"{self._http.shown(str(name))} and not {self._http.shown(str(before))}; serve the model that the run began with "
                "and resume, or start a new run"
            )
        said = _read(
            self._http, question, lambda answer: self._dialect.said(answer, request, k), answer
        )
        try:
            signal, lifted = validate_scores(said, request, k, self._vocabulary)
        except TeacherError as error:
            raise TeacherError(
                f"{self._http.address}{question.path}: the answer about {question.name} is wrong: {error}; nothing was learned "
                "from it; look at the server"
            ) from None
        self.scored += len(request.tokens)
        self.lifted += lifted
        if self.lifted > max(FEW, MOST_LIFTED * self.scored):
            raise TeacherError(
                f"{self._http.address}: {self.lifted} of {self.scored} log-probabilities are minus infinity or missing; take away "
                "what forbids tokens at the server, such as a grammar or a bias"
            )
        return signal

    def _check_room(self, request: ScoreRequest) -> None:
        tokens, context = len(request.prompt_tokens) + len(request.tokens), self._probe.context
        if context is not None and tokens + 1 > context:
            raise TeacherError(
                f"{self._http.address}: a prompt of {len(request.prompt_tokens)} and a completion of {len(request.tokens)} tokens, "
                f"and the one that the server must generate, do not fit its context of {context}; lower prompt_tokens or "
                "rollout.max_new_tokens, or serve a longer one"
            )

    def _check_budget(self, tokens: int) -> None:
        budget = self._speaker.limits.token_budget
        if budget is not None and self.spent + tokens > budget:
            raise TeacherError(
                f"{self._http.address}: {self.spent} tokens were scored and {tokens} more would exceed token_budget, {budget}; "
                "raise it and resume"
            )

    def check_same_model(self) -> None:
        """TeacherError where the server has another model than at the start: by its id, or by the canary."""
        names, _ = served(self._http)
        if names and self._probe.model not in names:
            raise TeacherError(
                f"{self._http.address}: the server's model changed: it has {', '.join(names)[:200]} and no {self._probe.model} any "
                "more; serve that one and resume"
            )
        canary = self._probe.sequence
        question = self._question("the canary", canary, 0)
        now = self._signal(question, canary, self._http.ask(question), 0).logprobs
        assert now is not None
        if not self._is_same(now):
            raise TeacherError(self._changed(now, "since the start"))

    def _changed(self, now: Tensor, since: str) -> str:
        return (
            f"{self._http.address}: the server's model changed {since}: a token of the canary moved by "
            f"{difference(now, self._canary):.3g} nats, and {self._probe.tolerance:.2g} is allowed; serve the model that the run "
            "began with and resume, or start a new run"
        )

    def folder_in(self, place: Path) -> str:
        """The name of the folder of this model's answers."""
        return canary_folder(place, self._probe.model, self._canary, self._is_same)

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """The server's own answers, in order."""
        questions = [
            self._dialect.writing(self._probe.model, request, params) for request in requests
        ]
        samples = self._speaker.asked(questions, self._dialect.written, params)
        largest = max((int(sample.tokens.max()) for sample in samples), default=0)
        if largest >= self._vocabulary:
            raise TeacherError(
                f"{self._http.address}: it wrote token {largest}, which is not in the vocabulary of {self._vocabulary}; look at "
                "which model is served"
            )
        return samples

    def save_state(self) -> dict[str, Tensor]:
        """What a resumed run compares with, and what it counts on from."""
        return {"canary": self._canary, "spent": torch.tensor([self.spent])}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up the count; TeacherError where the model is another one than that of the run."""
        before = tensors["canary"]
        if not self._is_same(before):
            raise TeacherError(self._changed(before, "since the run began"))
        self._canary = before
        self.spent = int(tensors["spent"])


class TextTeacher(Teacher):
    """Writes answers to messages in the server's own template and scores nothing; see `practicum.ports.Teacher`."""

    def __init__(
        self, speaker: ServerGenerator, capabilities: Capabilities, system: str | None
    ) -> None:
        self._speaker = speaker
        self._capabilities = capabilities
        self._system = system

    @property
    def capabilities(self) -> Capabilities:
        """No signal, but answers."""
        return self._capabilities

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """Silence about each rollout."""
        return [TeacherSignal() for _ in rollouts]

    def sample(self, requests: Sequence[TeacherRequest], params: SamplingParams) -> list[Sample]:
        """What the server answers, in the student's tokens."""
        questions = [
            build_chat_request(
                self._speaker.model, self._messages(request.prompt.messages), request.seed, params
            )
            for request in requests
        ]
        return self._speaker.asked(questions, parse_chat_completion, params)

    def _messages(self, messages: Sequence[Message]) -> list[dict[str, str]]:
        turns = [{"role": message.role, "content": message.content} for message in messages]
        lacks = self._system and all(message.role != "system" for message in messages)
        return [{"role": "system", "content": self._system or ""}, *turns] if lacks else turns

    def voice(self, prompt: Prompt) -> PromptedClient:
        """The server, answering this very prompt."""
        return PromptedClient(
            _ChatClient(self, prompt),
            self._speaker.renderer.render(prompt.messages),
            accepts_tokens=False,
        )


@dataclass(frozen=True, slots=True)
class _ChatClient:
    """A text teacher as a client of one prompt, whose tokens the server never sees."""

    teacher: TextTeacher
    prompt: Prompt

    @property
    def capabilities(self) -> Capabilities:
        """No signal, but answers."""
        return self.teacher.capabilities

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """One answer a seed."""
        return self.teacher.sample(
            [TeacherRequest(self.prompt, request.seed) for request in requests], params
        )

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """NoTeacher."""
        return [TeacherSignal() for _ in requests]


def canary_folder(
    place: Path, model: str, canary: Tensor, _is_same: Callable[[Tensor], bool]
) -> str:
    """The name of the folder of a served model's answers: that whose canary is its own, or the next one that is free."""
    stem = f"server-{hashlib.sha256(model.encode()).hexdigest()[:16]}"
    for number in count(1):
        file = place / f"{stem}-{number}" / "canary.json"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("x", encoding="utf-8") as new:
                json.dump(canary.tolist(), new)
        except FileExistsError:
            if not _is_same(_known(file)):
                continue
        except OSError as error:
            raise ResourceError(
                f"{file}: cannot be written ({error.strerror}); name another folder"
            ) from error
        return file.parent.name
    raise AssertionError("there is always a next number")


def _known(file: Path) -> Tensor:
    """The canary of a folder of answers; one that cannot be read is nobody's."""
    try:
        return torch.tensor(json.loads(file.read_text(encoding="utf-8")), dtype=torch.float32)
    except (OSError, ValueError, TypeError):
        return torch.zeros(0)


def _read(http: JsonClient, question: JsonRequest, read: Callable[[Any], T], answer: Any) -> T:
    """An answer in the dialects' own form; TeacherError where it has another."""
    try:
        return read(answer)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        reason = http.shown(f"{type(error).__name__}: {error}", 120)
        raise TeacherError(
            f"{http.address}{question.path}: the answer about {question.name} has not the form of the probe's ({reason}); look at "
            "the server's log, and resume"
        ) from None
