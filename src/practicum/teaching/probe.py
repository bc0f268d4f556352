"""Measure the capabilities of a server: dialect, models, candidates, noise, speed.

All requests are about one short sequence, the canary. Its log-probabilities also identify a model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from practicum.errors import CapabilityError, TeacherError
from practicum.remote.http import JsonClient, JsonRequest, RequestRefused
from practicum.teaching.chat_protocols import OpenAIProtocol
from practicum.teaching.checks import validate_scores
from practicum.teaching.dialects import (
    DIALECTS,
    WHOLE,
    Dialect,
    DialectName,
    ServerScores,
    read_model_name,
    read_states_name,
)
from practicum.text import make_printable
from practicum.text.safe import MAX_EXCERPT_CHARACTERS
from practicum.types import SampleRequest, SamplingParams, ScoreRequest, TeacherSignal

USUAL_VOCABULARY = 2048
"""A vocabulary size that every language model exceeds; smaller toy models declare their size."""

IGNORED = 1e-3
"""The difference of two temperatures' scores, in nats, below which a server ignores temperature."""

COMPLETE = 1e-4
"""The missing probability at each token below which candidates are the complete vocabulary."""

BEGINNINGS, PATIENCE = 8, 60.0
"""The number of canary prefixes that the server continues, and the seconds for each of them."""

FITS = 0.6
"""The share of greedy tokens that must also score best; rounding may change a few."""

NAMED = 8
"""The number of canary tokens with named candidates; all candidates differ from each other."""

NOISY = 1e-2
SHOWN_MODELS = 8
LONGEST_ID = 1000


@dataclass(frozen=True, slots=True)
class Probe:
    """The measured properties of a server.

    - dialect: None if the server samples and cannot score given tokens
    - largest_k: 0 if the server only returns log-probabilities of the given tokens
    - context: the longest text with one generated token, None if the server does not say
    - tempered: scores follow the request's temperature
    - noise: differences of the canary's scores, in nats, sent singly and in a batch
    - seconds: the time of one score
    - token_ids: completions come as token ids
    - canary, sequence: log-probabilities of the canary, and the canary itself
    - texts: the server's texts of some tokens
    - answered_by: the model that its answers name
    - parity: the share of the tokens it samples greedily that it also scores best
    - wire: bytes per token of requests and answers, for `sampled` and with `largest_k` candidates
    - names: the server scores candidates that a request names
    - writes_states: the server reports that it writes hidden states (the full distribution)
    - misplaced: how its scores are shifted against the tokens it generates, None if they are not
    """

    model: str
    models: tuple[str, ...]
    dialect: Dialect | None
    largest_k: int = 0
    context: int | None = None
    tempered: bool = False
    noise: tuple[float, float] = (0.0, 0.0)
    seconds: float = 0.0
    token_ids: bool = False
    canary: Tensor | None = None
    sequence: ScoreRequest = field(default_factory=lambda: ScoreRequest((), ()))
    texts: dict[int, str] | None = None
    answered_by: str | None = None
    parity: float | None = None
    wire: tuple[float, float] = (0.0, 0.0)
    misplaced: str | None = None
    writes_states: bool = False
    names: bool = False

    @property
    def canary_sum(self) -> float | None:
        """The sum of the canary's log-probabilities, which a recipe can pin as `canary`."""
        return None if self.canary is None else float(self.canary.double().sum())

    @property
    def tolerance(self) -> float:
        """The change of a canary token's score, in nats, above which the model has changed.

        It is 0.01, or three times the server's own noise.
        """
        return max(NOISY, 3 * max(self.noise))

    @property
    def signals(self) -> str:
        """The signals that a recipe can ask for, as written in a recipe."""
        if self.dialect is None:
            return (
                "text (it writes answers and does not score: rollout.source: teacher or "
                "mix(other=teacher), signal: text)"
            )
        topk = f", topk(k={self.largest_k}, support=teacher) or less" if self.largest_k else ""
        if self.names and self.dialect is not None:
            named = "each token's" if self.dialect.block == WHOLE else "some tokens' together"
            topk += f", topk(k, support=student) by naming {named}"
        full = ", full (teacher.states reads the hidden states that it writes)"
        return f"sampled{topk}{full if self.writes_states else ''}"

    def render_lines(self) -> list[str]:
        """Return the result for a terminal, line by line."""
        alias = offered_models = ""
        if self.answered_by not in (None, self.model):
            alias = f" (its answers say {make_printable(str(self.answered_by))[:MAX_EXCERPT_CHARACTERS]})"
        if len(self.models) > 1:
            offered_models = f" of {len(self.models)}: {', '.join(self.models[:SHOWN_MODELS])}"
        lines = [f"model: {self.model}{alias}{offered_models}", f"signals: {self.signals}"]
        if self.dialect is None:
            return [*lines, f"time: {self.seconds:.2f} s for one token"]
        if self.parity is not None and self.parity < FITS:
            lines.append(
                f"written: only {self.parity:.0%} of its greedy tokens are also the tokens that it "
                "scores best; look for a logit bias, a grammar, or different models behind "
                "generation and scoring"
            )
        form = "token ids" if self.token_ids else "text"
        context = "not said"
        if self.context is not None:
            context = f"{self.context} tokens, including one that the server must generate"
        tempered = "ignore the request's temperature"
        if self.tempered:
            tempered = "follow the request's temperature, and are requested at 1"
        alone, company = self.noise
        noisy = " (noisy: the same text gets other scores)" if max(self.noise) > NOISY else ""
        tokens = len(self.sequence.prompt_tokens) + len(self.sequence.tokens)
        return [
            *lines,
            f"dialect: {self.dialect.name}; its answers come as {form}",
            f"context: {context}",
            f"scores: {tempered}",
            f"repeated: differ by {alone:.1e} singly and {company:.1e} in a batch{noisy}",
            f"time: {self.seconds:.2f} s for {tokens} tokens",
            f"bytes: {self._describe_bytes()}",
            *([f"start with: {self.dialect.launch}"] if self.dialect.launch else []),
            *self._describe_states(),
            f"canary: {self.canary_sum:.4f}",
        ]

    def _describe_states(self) -> list[str]:
        """Return the flags and the cost of the full distribution, if the server supports it."""
        if self.dialect is None or not self.dialect.states_launch or self.writes_states:
            return []
        return [
            "full: not now; with these additional flags, the server writes hidden states, on this "
            f"machine or into a shared folder, 2 bytes x width per token: {self.dialect.states_launch}"
        ]

    def _describe_bytes(self) -> str:
        """Return the bytes of each signal per token of prompt and completion."""
        plain, candidates = (round(count) for count in self.wire)
        more = f", {candidates:,} with {self.largest_k} candidates" if self.largest_k else ""
        return f"{plain:,} per token for sampled{more}"


def build_canary(vocabulary: int | None) -> ScoreRequest:
    """Return a fixed sequence of tokens of the vocabulary.

    It is not natural text, so that the scores of two models differ.
    """
    size = min(vocabulary or USUAL_VOCABULARY, USUAL_VOCABULARY)
    ids = tuple((31 * n * n + 17 * n + 5) % size for n in range(27))
    return ScoreRequest(ids[:3], ids[3:])


def probe(
    client: JsonClient,
    dialect: DialectName,
    model: str | None,
    wanted_k: int,
    vocabulary: int | None,
    *,
    must_align: bool = True,
    temperature: float = 1.0,
) -> Probe:
    """Probe a server's capabilities, with at most `wanted_k` candidates, at a temperature.

    Errors: TeacherError if it cannot be reached, gives invalid answers, or (`must_align`) scores
    shifted positions; CapabilityError if it can neither score nor sample.
    """
    models, context = list_models(client)
    chosen = choose_model(client, models, model)
    failures: list[str] = []
    for candidate in DIALECTS if dialect == "auto" else [d for d in DIALECTS if d.name == dialect]:
        canary = build_canary(vocabulary)
        scorer = _CanaryScorer(client, candidate, chosen, vocabulary, canary, temperature)
        try:
            scorer.score(0)
        except (RequestRefused, _UnexpectedFormat) as error:
            _raise_if_unauthorized(error)
            failures.append(f"{candidate.name}: {error}")
            continue
        result = _probe_scores(scorer, models, context, wanted_k)
        if must_align and result.misplaced is not None:
            raise TeacherError(f"{client.address}: {result.misplaced}")
        return result
    if dialect in ("auto", "chat"):
        start = monotonic()
        messages = [{"role": "user", "content": "Hi"}]
        try:
            protocol = OpenAIProtocol()
            request = protocol.build_request(chosen, messages, 0, SamplingParams(1))
            protocol.parse_answer(client.ask(request))
            return Probe(chosen, models, None, context=context, seconds=monotonic() - start)
        except (RequestRefused, LookupError, TypeError, ValueError) as error:
            _raise_if_unauthorized(error)
            failures.append(f"chat: {client.quote(str(error))}")
    raise CapabilityError(
        f"{client.address}: no known request for log-probabilities or answers works "
        f"({'; '.join(failures)})"
    )


def _raise_if_unauthorized(error: Exception) -> None:
    # A missing or wrong key fails in every dialect: report it, not the dialects.
    if isinstance(error, RequestRefused) and error.status in (401, 403):
        raise error


class _UnexpectedFormat(Exception):
    """The answer is not in the dialect."""


@dataclass(frozen=True, slots=True)
class _ProbeAnswer:
    """A server's scores of a sequence: validated and raw, and the model that it names."""

    signal: TeacherSignal
    scores: ServerScores
    model: str | None
    writes_states: bool


@dataclass(frozen=True, slots=True)
class _CanaryScorer:
    """A server that is asked in one dialect about the canary."""

    client: JsonClient
    dialect: Dialect
    model: str
    vocabulary: int | None
    canary: ScoreRequest
    temperature: float

    def score(self, k: int, hotter: float = 1.0, company: int = 0) -> _ProbeAnswer:
        """Return the canary's scores, with `company` other sequences in the batch."""
        k = min(k, self.vocabulary or k)
        prompt, tokens = self.canary.prompt_tokens, self.canary.tokens
        # Rotations of the canary: other texts of the same length.
        rotations = [ScoreRequest(prompt, tokens[n:] + tokens[:n]) for n in range(1, company + 1)]
        json_requests = [
            self.dialect.build_score_request(self.model, request, k, hotter * self.temperature)
            for request in (self.canary, *rotations)
        ]
        answer = self.client.send_all(
            [replace(json_request, name="the canary") for json_request in json_requests]
        )[0]
        try:
            scores = self.dialect.parse_scores(answer, self.canary, k)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            reason = self.client.quote(f"{type(error).__name__}: {error}", 120)
            raise _UnexpectedFormat(f"the answer has another form ({reason})") from None
        try:
            returned_k = min(k, len(scores.top[0])) if k else 0
            signal, _ = validate_scores(scores, self.canary, returned_k, self.vocabulary)
        except TeacherError as error:
            raise TeacherError(
                f"{self.client.address}: the answer to the canary is wrong: {error}"
            ) from None
        writes_states = read_states_name(answer) is not None
        return _ProbeAnswer(signal, scores, read_model_name(answer), writes_states)


def _probe_scores(
    scorer: _CanaryScorer, models: tuple[str, ...], context: int | None, wanted_k: int
) -> Probe:
    # More candidates than tokens kill vLLM's engine, so a small vocabulary is requested completely.
    most = min(wanted_k, scorer.vocabulary or wanted_k)
    k = find_largest_k(lambda k: _count_candidates(scorer, k), most)
    # A server that gives a small vocabulary completely can answer any k.
    k = wanted_k if k == most else k
    client = scorer.client
    start, before = monotonic(), client.wire_bytes
    answer = scorer.score(k)
    seconds, with_candidates = monotonic() - start, client.wire_bytes - before
    canary = answer.signal.logprobs
    repeated = scorer.score(k).signal.logprobs
    batched = scorer.score(k, company=3).signal.logprobs
    before = client.wire_bytes
    hot = scorer.score(0, hotter=2.0).signal.logprobs
    plain = client.wire_bytes - before
    length = len(scorer.canary.prompt_tokens) + len(scorer.canary.tokens)
    tokens = _sample_greedily(scorer)
    parity, misplaced = _measure_parity(tokens, answer.signal)
    return Probe(
        model=scorer.model,
        models=models,
        dialect=scorer.dialect,
        largest_k=k,
        context=context,
        tempered=measure_difference(canary, hot) > IGNORED,
        noise=(measure_difference(canary, repeated), measure_difference(canary, batched)),
        seconds=seconds,
        token_ids=bool(tokens),
        canary=canary,
        sequence=scorer.canary,
        texts=dict(answer.scores.texts),
        answered_by=answer.model,
        parity=parity,
        wire=(plain / length, with_candidates / length),
        misplaced=misplaced,
        writes_states=answer.writes_states,
        names=_can_name(scorer, answer.signal),
    )


def measure_difference(first: Tensor | None, second: Tensor | None) -> float:
    """Return the largest difference of two lists of log-probabilities, in nats."""
    assert first is not None and second is not None
    return float((first - second).abs().max())


def match_canaries(first: Tensor, second: Tensor, tolerance: float) -> bool:
    """Return True if two canaries match: equal length, and no difference above the tolerance."""
    return first.shape == second.shape and measure_difference(first, second) <= tolerance


def _count_candidates(scorer: _CanaryScorer, k: int) -> int:
    """Return how many of k candidates the server gives: 0 if it refuses.

    A complete vocabulary of fewer than k tokens counts as k.
    """
    try:
        logprobs = scorer.score(k).signal.topk_logprobs
    except (RequestRefused, _UnexpectedFormat):
        return 0
    if logprobs is None:
        return 0
    is_complete = bool((logprobs.exp().sum(dim=-1) > 1 - COMPLETE).all())
    return k if is_complete else logprobs.shape[1]


def _can_name(scorer: _CanaryScorer, expected: TeacherSignal) -> bool:
    """Return True if the server scores named candidates: the canary's own tokens and two others."""
    if not scorer.dialect.block or expected.logprobs is None:
        return False
    size = scorer.vocabulary or USUAL_VOCABULARY
    tokens = torch.tensor(scorer.canary.tokens[:NAMED])
    named = torch.stack([(tokens + step) % size for step in (1, 0, 2)], dim=1)
    request = ScoreRequest(scorer.canary.prompt_tokens, scorer.canary.tokens[:NAMED], named)
    json_request = scorer.dialect.build_naming_request(scorer.model, request, scorer.temperature)
    try:
        answer = scorer.client.ask(replace(json_request, name="named candidates"))
        scores = scorer.dialect.parse_named(answer, request)
        signal, _ = validate_scores(scores, request, 3, scorer.vocabulary)
    except (RequestRefused, LookupError, TypeError, ValueError, AttributeError, TeacherError):
        # A server that does not know the field refuses it, or answers without these scores.
        return False
    assert signal.topk_ids is not None and signal.topk_logprobs is not None
    repeated = (signal.topk_ids == tokens[:, None]).float() * signal.topk_logprobs
    # A token's score must be the same with and without being named.
    return measure_difference(repeated.sum(dim=1), expected.logprobs[:NAMED]) <= NOISY


def find_largest_k(count: Callable[[int], int], wanted_k: int) -> int:
    """Return the most candidates that a server gives; `count(k)` asks for k and counts them.

    A server may give fewer candidates than requested, or refuse the request (0).
    """
    most = count(wanted_k) if wanted_k else 0
    if most or not wanted_k:
        return most
    low, high = 0, wanted_k
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) == middle else (low, middle)
    return low


def _sample_greedily(scorer: _CanaryScorer) -> list[int]:
    """Return the server's greedy token after each prefix of the canary; empty without token ids."""
    prompt, tokens = scorer.canary.prompt_tokens, scorer.canary.tokens
    params = SamplingParams(1, temperature=0.0)
    json_requests = []
    for count in range(BEGINNINGS):
        request = SampleRequest(prompt + tokens[:count], 0)
        json_request = scorer.dialect.build_sample_request(scorer.model, request, params)
        json_requests.append(replace(json_request, name="a token to write", seconds=PATIENCE))
    try:
        completions = [
            scorer.dialect.parse_completion(answer).tokens
            for answer in scorer.client.send_all(json_requests)
        ]
    except (RequestRefused, LookupError, TypeError, ValueError, AttributeError):
        return []
    return [completion[0] for completion in completions if completion]


def _measure_parity(
    greedy: Sequence[int], scored: TeacherSignal
) -> tuple[float | None, str | None]:
    """Return the share of greedy tokens that also score best, None if it cannot be measured.

    The second value describes a shift if the tokens score best one position before or after.
    """
    if scored.topk_ids is None or len(greedy) != BEGINNINGS:
        return None, None
    best = scored.topk_ids[:BEGINNINGS, 0].tolist()
    aligned = _compare(greedy, best)
    before, after = _compare(greedy[1:], best), _compare(greedy, best[1:])
    if aligned >= FITS or max(before, after) < FITS:
        return aligned, None
    where = "one before" if before > after else "next one"
    return aligned, (
        "its scores are off by one position: of its greedy tokens, "
        f"{aligned:.0%} are scored best at their own position, and {max(before, after):.0%} at the "
        f"{where}; look at how the server, or a proxy before it, cuts its lists"
    )


def _compare(greedy: Sequence[int], best: Sequence[int]) -> float:
    """Return the share of equal tokens over the length of the shorter list."""
    pairs = list(zip(greedy, best, strict=False))
    return sum(first == second for first, second in pairs) / len(pairs)


def list_models(client: JsonClient) -> tuple[tuple[str, ...], int | None]:
    """Return the ids of a server's models, and the context of the first model, if known."""
    try:
        answer = client.ask(JsonRequest("/v1/models", name="the list of models"))
    except RequestRefused as error:
        if error.status in (401, 403):
            raise
        return (), None
    try:
        entries: Sequence[Any] = answer["data"]
        names = tuple(client.quote(str(entry["id"]), LONGEST_ID) for entry in entries)
        length = entries[0].get("max_model_len") if entries else None
    except (LookupError, TypeError, AttributeError):
        raise TeacherError(
            f"{client.address}/v1/models: the answer is not a list of models; check the address"
        ) from None
    return names, length if isinstance(length, int) and length > 0 else None


def choose_model(client: JsonClient, models: Sequence[str], name: str | None) -> str:
    """Return the name of the model to ask: the named one, or the only one."""
    if name is not None and (name in models or not models):
        return name
    offered = ", ".join(models[:SHOWN_MODELS]) or "none that it names"
    if name is not None:
        raise TeacherError(
            f"{client.address}: no model {name!r} is served there; it has: {offered}"
        )
    if len(models) > 1:
        raise CapabilityError(
            f"{client.address}: {len(models)} models are served there; "
            f"set model to one of {offered}"
        )
    return models[0] if models else "default"
