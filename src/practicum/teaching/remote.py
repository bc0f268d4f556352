"""A server as a scorer: one request per completion, with checks of answers and model."""

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
from jaxtyping import Int
from torch import Tensor

from practicum.costs import Meter, Phase
from practicum.errors import ResourceError, TeacherError
from practicum.objective import Signal
from practicum.ports import (
    Capabilities,
    SamplingClient,
    StepFollower,
)
from practicum.ports.gate import repair_text
from practicum.remote.http import JsonClient, JsonRequest
from practicum.teaching.checks import MOST, is_token, validate_scores
from practicum.teaching.dialects import (
    Dialect,
    ServerCompletion,
    ServerScores,
    read_model_name,
)
from practicum.teaching.probe import Probe, list_models, match_canaries, measure_difference
from practicum.text import Renderer, refuse_stop_texts
from practicum.types import (
    Sample,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    TeacherSignal,
)

Read = TypeVar("Read")
"""The value that is read from a server's answer about a text."""

MOST_CLAMPED = 1e-3
"""The largest share of log-probabilities that may be minus infinity."""

ALWAYS_ALLOWED = 10
"""The number of clamped log-probabilities that is always allowed, even above that share."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """The limits of a server: seconds per request, speed, concurrency, and tokens to score."""

    seconds: float = 30.0
    tokens_per_second: float = 50.0
    concurrency: int = 16
    token_budget: int | None = None
    canary_every: int = 16

    def add_timeout(self, request: JsonRequest, tokens: int) -> JsonRequest:
        """Return the request with a timeout for its own and all concurrent requests' tokens."""
        seconds = self.seconds + self.concurrency * tokens / self.tokens_per_second
        return replace(request, seconds=seconds)


@dataclass(frozen=True, slots=True)
class ServerGenerator:
    """A server that samples completions, turned into the student's tokens; `meter` counts bytes."""

    http: JsonClient
    model: str
    renderer: Renderer
    limits: ServerLimits
    meter: Meter | None = None

    @contextlib.contextmanager
    def counting(self, phase: Phase) -> Iterator[None]:
        """Count the bytes sent and received in the block, even if it fails."""
        before = self.http.wire_bytes
        try:
            yield
        finally:
            if self.meter is not None:
                self.meter.count_bytes(phase, self.http.wire_bytes - before)

    def request_samples(
        self,
        requests: Sequence[JsonRequest],
        parse: Callable[[Any], ServerCompletion],
        params: SamplingParams,
    ) -> list[Sample]:
        """Send requests for completions and return the samples in their order."""
        refuse_stop_texts(params, self.http.address)
        named = [
            replace(request, name=f"answer {number} of {len(requests)}")
            for number, request in enumerate(requests, start=1)
        ]
        limited = [self.limits.add_timeout(request, params.max_new_tokens) for request in named]
        with self.counting("sample"):
            answers = self.http.send_all(limited)
        samples = []
        for request, answer in zip(named, answers, strict=True):
            with refuse_other_form(self.http, request):
                completion = parse(answer)
            samples.append(self.build_sample(completion, params))
        return samples

    def build_sample(self, completion: ServerCompletion, params: SamplingParams) -> Sample:
        """Return the completion as a sample.

        Unknown log-probabilities are 0 for the sampler and NaN for the policy.
        """
        tokens = self._read_tokens(completion, params)
        logprobs = torch.zeros(len(tokens))
        policy = torch.full((len(tokens),), math.nan)
        numbers = completion.logprobs
        if (
            isinstance(numbers, list)
            and len(numbers) == len(tokens)
            and all(isinstance(number, int | float) and -MOST <= number <= 0 for number in numbers)
        ):
            logprobs = torch.tensor(numbers, dtype=torch.float32)
            policy = logprobs.clone() if params.temperature == 1.0 else policy
        reason = "stop" if tokens[-1] in params.stop_ids else "length"
        text = completion.text if completion.tokens is None else None
        return Sample(torch.tensor(tokens, dtype=torch.long), logprobs, policy, reason, text)

    def _read_tokens(self, completion: ServerCompletion, params: SamplingParams) -> list[int]:
        """Return the completion in the student's tokens, with a stop token exactly if it stopped.

        TeacherError if the completion is empty, or if its entries are not token ids.
        """
        limit, stops = params.max_new_tokens, params.stop_ids
        if completion.tokens is None:
            text, messages = repair_text(completion.text), completion.messages
            tokens = self.renderer.encode_answer(messages, text, limit, drops_thoughts=True)
            if not completion.is_stopped and len(tokens) > 1 and tokens[-1] in stops:
                # The renderer ends each answer with a stop token, and this answer was truncated.
                tokens = tokens[:-1]
        else:
            if not isinstance(completion.tokens, list):
                raise self._refuse("no list of token ids")
            tokens = completion.tokens[:limit]
            if not all(map(is_token, tokens)):
                raise self._refuse("what is no token id")
            has_stop = bool(tokens) and tokens[-1] in stops
            if completion.is_stopped and not has_stop and len(tokens) < limit:
                # Some servers leave the stop token out of the ids that they return.
                stop = completion.stop_token
                tokens.append(stop if stop in stops else min(stops))
        if not tokens:
            raise self._refuse("no token")
        return tokens

    def _refuse(self, content: str) -> TeacherError:
        return TeacherError(
            f"{self.http.address}: an answer holds {content}; look at the server's log"
        )


class RemoteClient(StepFollower, SamplingClient):
    """A client that scores and samples through a server.

    Errors are TeacherErrors: an unreachable server, an impossible answer, or a model that changed
    since the start. Its state is the canary of the start and the number of tokens scored so far.
    """

    def __init__(
        self,
        generator: ServerGenerator,
        probe: Probe,
        dialect: Dialect,
        capabilities: Capabilities,
        vocabulary: int,
        temperature: float = 1.0,
    ) -> None:
        assert probe.canary is not None, "a probe that found a dialect has scored the canary"
        self._generator = generator
        self._http = generator.http
        self._probe = probe
        self._dialect = dialect
        self._capabilities = capabilities
        self._vocabulary = vocabulary
        self._temperature = temperature
        self._canary = probe.canary
        self._calls = self._tokens_used = self._logprobs = self._clamped = 0

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the server, as far as the recipe allows them."""
        return self._capabilities

    @property
    def address(self) -> str:
        """The server's address, for messages."""
        return self._http.address

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """Return log-probabilities of each request's tokens, and of the top k on request."""
        with self._generator.counting("score"):
            return self._score(requests, signal)

    def _score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        if signal.chooser == "student":
            return self._score_named(requests)
        k = min(signal.candidates, self._vocabulary)
        return self.ask_about(
            requests,
            lambda request: self._build_body(request, k),
            lambda json_request, request, answer: self._parse_signal(
                json_request, request, answer, k
            ),
            TeacherSignal(logprobs=torch.zeros(0)),
        )

    def _score_named(self, requests: Sequence[ScoreRequest]) -> list[TeacherSignal]:
        """Return the log-probabilities of the candidates that the requests name."""
        # If a server scores all named ids at each position, each request only covers a few tokens.
        blocks = [_cut(request, self._dialect.block) for request in requests]
        answers = iter(
            self.ask_about(
                [block for parts in blocks for block in parts],
                self._build_naming_body,
                self._parse_named,
                TeacherSignal(logprobs=torch.zeros(0)),
            )
        )
        return [_join([next(answers) for _ in parts]) for parts in blocks]

    def _build_naming_body(self, request: ScoreRequest) -> JsonRequest:
        model, temperature = self._probe.model, self._temperature
        return self._dialect.build_naming_request(model, request, temperature)

    def _parse_named(
        self, json_request: JsonRequest, request: ScoreRequest, answer: Any
    ) -> TeacherSignal:
        assert request.candidates is not None
        with refuse_other_form(self._http, json_request):
            scores = self._dialect.parse_named(answer, request)
        signal = self._validate(json_request, request, scores, request.candidates.shape[1])
        return order_candidates(signal, request.candidates)

    def ask_about(
        self,
        requests: Sequence[ScoreRequest],
        build: Callable[[ScoreRequest], JsonRequest],
        parse: Callable[[JsonRequest, ScoreRequest, Any], Read],
        empty: Read,
    ) -> list[Read]:
        """Ask about each text within context and budget, and check that the model stays the same.

        `empty` is the answer for a text without tokens, which is not sent.
        """
        indexed = [(index, request) for index, request in enumerate(requests) if request.tokens]
        tokens = sum(_count_tokens(request) for _, request in indexed)
        for _, request in indexed:
            self._check_context(request)
        if indexed:
            # Checked before the requests are sent: at a hosted server the budget is money.
            self._check_budget(tokens)
            # Requests carry a model's name and no fingerprint: a server may be restarted with other
            # weights under the same name, and its scores would look valid.
            if self._calls and self._calls % self._generator.limits.canary_every == 0:
                self.check_same_model()
            self._calls += 1
        json_requests = [
            self._name_request(f"completion {index + 1} of {len(requests)}", request, build)
            for index, request in indexed
        ]

        def read(number: int, answer: Any) -> Read:
            self._check_name(json_requests[number], answer)
            return parse(json_requests[number], indexed[number][1], answer)

        failures = self._http.failures
        # Each answer is parsed on arrival: all answers together would take many times the memory as
        # JSON.
        answers = self._http.send_all(json_requests, read)
        if self._http.failures != failures:
            # The server may have been started again with another model.
            self.check_same_model()
        self._tokens_used += tokens
        results = {index: answer for (index, _), answer in zip(indexed, answers, strict=True)}
        return [results.get(index, empty) for index in range(len(requests))]

    def _name_request(
        self, name: str, request: ScoreRequest, build: Callable[[ScoreRequest], JsonRequest]
    ) -> JsonRequest:
        body = replace(build(request), name=name)
        return self._generator.limits.add_timeout(body, _count_tokens(request))

    def _build_body(self, request: ScoreRequest, k: int) -> JsonRequest:
        model, temperature = self._probe.model, self._temperature
        return self._dialect.build_score_request(model, request, k, temperature)

    def _check_name(self, json_request: JsonRequest, answer: Any) -> None:
        name, first_name = read_model_name(answer), self._probe.answered_by
        # Behind a router a request may reach another model than the probe did.
        if name != first_name:
            raise TeacherError(
                f"{self._http.address}: the server's model changed since the start: "
                f"{json_request.name} was answered by {self._http.quote(str(name))} and not "
                f"{self._http.quote(str(first_name))}; serve the model that the run began with and "
                "resume, or start a new run"
            )

    def _parse_signal(
        self, json_request: JsonRequest, request: ScoreRequest, answer: Any, k: int
    ) -> TeacherSignal:
        with refuse_other_form(self._http, json_request):
            scores = self._dialect.parse_scores(answer, request, k)
        return self._validate(json_request, request, scores, k)

    def _validate(
        self, json_request: JsonRequest, request: ScoreRequest, scores: ServerScores, k: int
    ) -> TeacherSignal:
        try:
            signal, clamped = validate_scores(scores, request, k, self._vocabulary)
        except TeacherError as error:
            raise TeacherError(
                f"{self._http.address}{json_request.path}: the answer about {json_request.name} is "
                f"wrong: {error}; nothing was learned from it; look at the server"
            ) from None
        self._logprobs += len(request.tokens)
        self._clamped += clamped
        if self._clamped > max(ALWAYS_ALLOWED, MOST_CLAMPED * self._logprobs):
            raise TeacherError(
                f"{self._http.address}: {self._clamped} of {self._logprobs} log-probabilities are "
                "minus infinity or missing; remove token restrictions at the server, such as a "
                "grammar or a bias"
            )
        return signal

    def _check_context(self, request: ScoreRequest) -> None:
        prompt, completion = len(request.prompt_tokens), len(request.tokens)
        context = self._probe.context
        if context is not None and prompt + completion + 1 > context:
            raise TeacherError(
                f"{self._http.address}: a prompt of {prompt} tokens, a completion of {completion} "
                "tokens and one generated token do not fit the server's context of "
                f"{context}; lower prompt_tokens or rollout.max_new_tokens, or serve a longer "
                "context"
            )

    def _check_budget(self, tokens: int) -> None:
        budget = self._generator.limits.token_budget
        if budget is not None and self._tokens_used + tokens > budget:
            raise TeacherError(
                f"{self._http.address}: {self._tokens_used} tokens were scored and {tokens} more "
                f"would exceed token_budget, {budget}; raise it and resume"
            )

    def check_same_model(self) -> None:
        """Raise TeacherError if the server's model changed since the start, by id or by canary."""
        names, _ = list_models(self._http)
        if names and self._probe.model not in names:
            raise TeacherError(
                f"{self._http.address}: the server's model changed: it has "
                f"{', '.join(names)[:200]} and no {self._probe.model} any more; serve that model and "
                "resume"
            )
        request = self._probe.sequence
        json_request = self._name_request(
            "the canary", request, lambda request: self._build_body(request, 0)
        )
        answer = self._http.ask(json_request)
        self._check_name(json_request, answer)
        canary = self._parse_signal(json_request, request, answer, 0).logprobs
        assert canary is not None
        self._check_canary(canary, "since the start")

    def _check_canary(self, canary: Tensor, since: str) -> None:
        if not match_canaries(canary, self._canary, self._probe.tolerance):
            raise TeacherError(
                f"{self._http.address}: the server's model changed {since}: a token of the canary "
                f"moved by {measure_difference(canary, self._canary):.3g} nats, and "
                f"{self._probe.tolerance:.2g} is allowed; serve the model that the run began with "
                "and resume, or start a new run"
            )

    def find_folder(self, folder: Path) -> str:
        """Return the name of the folder that holds this model's answers."""
        tolerance = self._probe.tolerance
        return find_canary_folder(folder, self._probe.model, self._canary, tolerance)

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """Sample completions at the server, in the order of the requests."""
        json_requests = [
            self._dialect.build_sample_request(self._probe.model, request, params)
            for request in requests
        ]
        parse = self._dialect.parse_completion
        samples = self._generator.request_samples(json_requests, parse, params)
        largest = max((int(sample.tokens.max()) for sample in samples), default=0)
        if largest >= self._vocabulary:
            raise TeacherError(
                f"{self._http.address}: it wrote token {largest}, which is not in the vocabulary "
                f"of {self._vocabulary}; look at which model is served"
            )
        return samples

    def save_state(self) -> dict[str, Tensor]:
        """Return the canary that a resumed run compares with, and the tokens used so far."""
        return {"canary": self._canary, "spent": torch.tensor([self._tokens_used])}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the count of tokens; TeacherError if the run began with another model."""
        self._check_canary(tensors["canary"], "since the run began")
        self._canary = tensors["canary"]
        self._tokens_used = int(tensors["spent"])


def order_candidates(signal: TeacherSignal, candidates: Int[Tensor, "T K"]) -> TeacherSignal:
    """Return a signal about named candidates in the order in which they were named."""
    assert signal.topk_ids is not None and signal.topk_logprobs is not None
    by_id = signal.topk_ids.argsort(dim=1)
    ranks = candidates.argsort(dim=1).argsort(dim=1)
    values = signal.topk_logprobs.gather(1, by_id).gather(1, ranks)
    return replace(signal, topk_ids=candidates.long(), topk_logprobs=values)


def _cut(request: ScoreRequest, block: int) -> list[ScoreRequest]:
    """Cut a text into parts of at most `block` tokens, each with the preceding text as prompt."""
    named, text = request.candidates, [*request.prompt_tokens, *request.tokens]
    starts = range(0, len(request.tokens), block) or range(1)
    first = len(request.prompt_tokens)
    return [
        ScoreRequest(
            tuple(text[: first + start]),
            request.tokens[start : start + block],
            None if named is None else named[start : start + block],
        )
        for start in starts
    ]


def _join(parts: Sequence[TeacherSignal]) -> TeacherSignal:
    """Return the parts of a text's signal as one."""
    if len(parts) == 1:
        return parts[0]
    logprobs, ids, values = (
        [tensor for part in parts if (tensor := read(part)) is not None]
        for read in (
            lambda part: part.logprobs,
            lambda part: part.topk_ids,
            lambda part: part.topk_logprobs,
        )
    )
    return TeacherSignal(torch.cat(logprobs), torch.cat(ids), torch.cat(values))


def _count_tokens(request: ScoreRequest) -> int:
    return len(request.prompt_tokens) + len(request.tokens)


def find_canary_folder(folder: Path, model: str, canary: Tensor, tolerance: float) -> str:
    """Return the name of the folder of a served model's answers.

    It is the folder with the model's canary, or else the next free one, which gets the canary.
    """
    stem = f"server-{hashlib.sha256(model.encode()).hexdigest()[:16]}"
    for number in count(1):
        file = folder / f"{stem}-{number}" / "canary.json"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            # "x" fails if the file exists: of two runs that start at once, only one takes the name.
            with file.open("x", encoding="utf-8") as new:
                json.dump(canary.tolist(), new)
        except FileExistsError:
            if not match_canaries(_read_canary(file), canary, tolerance):
                continue
        except OSError as error:
            raise ResourceError(
                f"{file}: cannot be written ({error.strerror}); name another folder"
            ) from error
        return file.parent.name
    raise AssertionError("the numbers cannot run out")


def _read_canary(file: Path) -> Tensor:
    """Return the canary of a folder of answers; an unreadable one is empty and matches no model."""
    try:
        return torch.tensor(json.loads(file.read_text(encoding="utf-8")), dtype=torch.float32)
    except (OSError, ValueError, TypeError):
        return torch.zeros(0)


@contextlib.contextmanager
def refuse_other_form(http: JsonClient, request: JsonRequest) -> Iterator[None]:
    """Raise TeacherError if the block fails to parse the answer to a request."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        reason = http.quote(f"{type(error).__name__}: {error}", 120)
        raise TeacherError(
            f"{http.address}{request.path}: the answer about {request.name} has not the form of "
            f"the probe's ({reason}); look at the server's log, and resume"
        ) from None
