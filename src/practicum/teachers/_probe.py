"""What a server can give, found out by asking it: dialect, models, candidates, temperature, determinism, speed.

All questions are about one short sequence, the canary, whose log-probabilities are also how a model is recognised.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

from torch import Tensor

from practicum.errors import CapabilityError, TeacherError
from practicum.remote.http import JsonClient, JsonRequest, RequestRefused
from practicum.teachers._checks import validate_scores
from practicum.teachers._dialects import (
    DIALECTS,
    Dialect,
    DialectName,
    ServerScores,
    answered_by,
    build_chat_request,
    parse_chat_completion,
)
from practicum.text import make_printable
from practicum.text.safe import SHOWN
from practicum.types import SampleRequest, SamplingParams, ScoreRequest, TeacherSignal

ORDINARY = 2048
"""Every vocabulary of a language model has so many tokens; those of toys have fewer, and say so."""

IGNORED = 1e-3
"""Log-probabilities of one canary at two temperatures that are nearer than this ignore the temperature."""

WHOLE = 1e-4
"""Candidates that lack no more probability than this at any token are the whole vocabulary."""

BEGINNINGS, PATIENCE = 8, 60.0
"""Beginnings of the canary after each of which the server writes a token, and the seconds that each may take."""

FITS = 0.6
"""The share of the tokens it writes as the likeliest that a server scores as the likeliest; rounding may change a few."""

NOISY = 1e-2
SHOWN_MODELS = 8
LONGEST_ID = 1000


@dataclass(frozen=True, slots=True)
class Probe:
    """What was found. `dialect` None: the server writes, and scores nothing that it is given.

    `largest_k` 0: log-probabilities of the given tokens alone. `context` is the longest text with the token that must be generated
    after it, None: the server does not say. `noise` is how far two scores of the canary differ alone and in company (nats),
    `seconds` what one took, `texts` how the server writes some tokens, `answered_by` the model that its answers name,
    `parity` the share of the tokens it writes as the likeliest that it scores as the likeliest, `sequence` the canary and `canary`
    its log-probabilities.
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

    @property
    def mark(self) -> float | None:
        """The sum of the canary's log-probabilities, which a recipe can pin as `canary`."""
        return None if self.canary is None else float(self.canary.double().sum())

    @property
    def tolerance(self) -> float:
        """How far a token of the canary may move before it is another model: 0.01, or three times the server's own noise."""
        return max(NOISY, 3 * max(self.noise))

    @property
    def signals(self) -> str:
        """The signals that a recipe can ask for, as it writes them."""
        if self.dialect is None:
            return "text (it writes answers and scores none: rollout.source: teacher or mix(other=teacher), signal: text)"
        topk = f", topk(k={self.largest_k}, support=teacher) or less" if self.largest_k else ""
        return f"sampled{topk}"

    def lines(self) -> list[str]:
        """What a person wants to know."""
        alias = ""
        if self.answered_by not in (None, self.model):
            alias = f" (its answers say {make_printable(str(self.answered_by))[:SHOWN]})"
        others = (
            f" of {len(self.models)}: {', '.join(self.models[:SHOWN_MODELS])}"
            if len(self.models) > 1
            else ""
        )
        first = [f"model: {self.model}{alias}{others}", f"signals: {self.signals}"]
        if self.dialect is None:
            return [*first, f"time: {self.seconds:.2f} s for one token"]
        room = (
            "not said"
            if self.context is None
            else f"{self.context} tokens, one of which the server must generate"
        )
        alone, company = self.noise
        noisy = " (noisy: the same text gets other scores)" if max(self.noise) > NOISY else ""
        tempered = "ignore the request's temperature"
        if self.tempered:
            tempered = "follow the request's temperature, and are asked at 1"
        if self.parity is not None and self.parity < FITS:
            first.append(
                f"written: of the tokens that it writes as the likeliest {self.parity:.0%} are those that it scores best; look for "
                "a bias, a grammar, or another model behind one of the two"
            )
        return [
            *first,
            f"dialect: {self.dialect.name}; its answers come as {'token ids' if self.token_ids else 'text'}",
            f"context: {room}",
            f"scores: {tempered}",
            f"repeated: differ by {alone:.1e} alone and {company:.1e} in company{noisy}",
            f"time: {self.seconds:.2f} s for {len(self.sequence.prompt_tokens) + len(self.sequence.tokens)} tokens",
            f"canary: {self.mark:.4f}",
        ]


def canary_of(vocabulary: int | None) -> ScoreRequest:
    """A fixed sequence of tokens that the vocabulary has; it is no text, and a model's opinion of it is its own."""
    ids = [
        (31 * place * place + 17 * place + 5) % min(vocabulary or ORDINARY, ORDINARY)
        for place in range(27)
    ]
    return ScoreRequest(tuple(ids[:3]), tuple(ids[3:]))


def probe(
    client: JsonClient,
    dialect: DialectName,
    model: str | None,
    wanted_k: int,
    vocabulary: int | None,
) -> Probe:
    """Ask a server what it can do; `wanted_k` is the most candidates that are tried.

    Raises TeacherError where it cannot be reached or answers nonsense, CapabilityError where it neither scores nor writes.
    """
    models, context = served(client)
    chosen = chosen_model(client, models, model)
    tried: list[str] = []
    for candidate in DIALECTS if dialect == "auto" else [d for d in DIALECTS if d.name == dialect]:
        scores = _CanaryScorer(client, candidate, chosen, vocabulary, canary_of(vocabulary))
        try:
            scores.of(0)
        except (RequestRefused, _UnexpectedFormat) as error:
            if isinstance(error, RequestRefused) and error.status in (401, 403):
                raise
            tried.append(f"{candidate.name}: {error}")
            continue
        return _scoring(scores, models, context, wanted_k)
    if dialect in ("auto", "chat"):
        started = monotonic()
        try:
            parse_chat_completion(
                client.ask(
                    build_chat_request(
                        chosen, [{"role": "user", "content": "Hi"}], 0, SamplingParams(1)
                    )
                )
            )
            return Probe(chosen, models, None, context=context, seconds=monotonic() - started)
        except (RequestRefused, LookupError, TypeError, ValueError) as error:
            if isinstance(error, RequestRefused) and error.status in (401, 403):
                raise
            tried.append(f"chat: {client.shown(str(error))}")
    raise CapabilityError(
        f"{client.address}: no way of asking for log-probabilities or answers works ({'; '.join(tried)})"
    )


class _UnexpectedFormat(Exception):
    """The answer is not of the dialect."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a server said about a sequence: checked, as it stood there, and the name of the model that said it."""

    signal: TeacherSignal
    said: ServerScores
    by: str | None


@dataclass(frozen=True, slots=True)
class _CanaryScorer:
    """Asks one server in one dialect about the canary."""

    client: JsonClient
    dialect: Dialect
    model: str
    vocabulary: int | None
    canary: ScoreRequest

    def of(self, k: int, temperature: float = 1.0, company: int = 0) -> _Answer:
        """The canary's scores, alone or as the first of several sequences at once."""
        k = min(k, self.vocabulary or k)
        prompt, tokens = self.canary.prompt_tokens, self.canary.tokens
        others = [ScoreRequest(prompt, tokens[n:] + tokens[:n]) for n in range(1, company + 1)]
        questions = [
            self.dialect.scoring(self.model, request, k, temperature)
            for request in (self.canary, *others)
        ]
        answer = self.client.send_all(
            [replace(question, name="the canary") for question in questions]
        )[0]
        try:
            said = self.dialect.said(answer, self.canary, k)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            reason = self.client.shown(f"{type(error).__name__}: {error}", 120)
            raise _UnexpectedFormat(f"the answer has another form ({reason})") from None
        try:
            signal, _ = validate_scores(
                said, self.canary, min(k, len(said.top[0])) if k else 0, self.vocabulary
            )
            return _Answer(signal, said, answered_by(answer))
        except TeacherError as error:
            raise TeacherError(
                f"{self.client.address}: the answer to the canary is wrong: {error}"
            ) from None


def _scoring(
    scores: _CanaryScorer, models: tuple[str, ...], context: int | None, wanted_k: int
) -> Probe:
    # vLLM's engine dies of more candidates than there are tokens, so a small vocabulary is asked for whole.
    most = min(wanted_k, scores.vocabulary or wanted_k)
    k = largest_k(lambda k: _candidates(scores, k), most)
    k = wanted_k if k == most else k
    started = monotonic()
    about = scores.of(k)
    first, seconds = about.signal, monotonic() - started
    again, beside = scores.of(k).signal, scores.of(k, company=3).signal
    hot = scores.of(0, temperature=2.0).signal
    written = _written(scores)
    return Probe(
        model=scores.model,
        models=models,
        dialect=scores.dialect,
        largest_k=k,
        context=context,
        tempered=difference(first.logprobs, hot.logprobs) > IGNORED,
        noise=(
            difference(first.logprobs, again.logprobs),
            difference(first.logprobs, beside.logprobs),
        ),
        seconds=seconds,
        token_ids=bool(written),
        canary=first.logprobs,
        sequence=scores.canary,
        texts=dict(about.said.texts),
        answered_by=about.by,
        parity=_parity(scores.client, written, first),
    )


def difference(one: Tensor | None, other: Tensor | None) -> float:
    """The largest difference of two lists of log-probabilities, in nats."""
    assert one is not None and other is not None
    return float((one - other).abs().max())


def _candidates(scores: _CanaryScorer, k: int) -> int:
    """How many candidates come back when k are asked for: k also where the whole vocabulary is less, 0 where it is refused."""
    try:
        logprobs = scores.of(k).signal.topk_logprobs
    except (RequestRefused, _UnexpectedFormat):
        return 0
    if logprobs is None:
        return 0
    whole = bool((logprobs.exp().sum(dim=-1) > 1 - WHOLE).all())
    return k if whole else logprobs.shape[1]


def largest_k(given: Callable[[int], int], wanted: int) -> int:
    """The most candidates up to `wanted` that a server gives; it may give fewer than are asked for, or refuse (0)."""
    most = given(wanted) if wanted else 0
    if most or not wanted:
        return most
    low, high = 0, wanted
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if given(middle) == middle else (low, middle)
    return low


def _written(scores: _CanaryScorer) -> list[int]:
    """Return the likeliest token after each beginning of the canary, as the server writes it; none where it gives no ids."""
    prompt, tokens = scores.canary.prompt_tokens, scores.canary.tokens
    requests = [SampleRequest(prompt + tokens[:count], 0) for count in range(BEGINNINGS)]
    params = SamplingParams(1, temperature=0.0)
    questions = [
        replace(
            scores.dialect.writing(scores.model, request, params),
            name="a token to write",
            seconds=PATIENCE,
        )
        for request in requests
    ]
    try:
        answers = [
            scores.dialect.written(answer).tokens for answer in scores.client.send_all(questions)
        ]
    except (RequestRefused, LookupError, TypeError, ValueError, AttributeError):
        return []
    return [tokens[0] for tokens in answers if tokens]


def _parity(client: JsonClient, written: Sequence[int], about: TeacherSignal) -> float | None:
    """Return the share of tokens written as the likeliest that are scored as the likeliest; None where this cannot be told.

    Raises TeacherError where they are those of the position before or after.
    """
    if about.topk_ids is None or len(written) != BEGINNINGS:
        return None
    best = about.topk_ids[:BEGINNINGS, 0].tolist()
    own, before, after = _fit(written, best), _fit(written[1:], best), _fit(written, best[1:])
    if own < FITS <= max(before, after):
        where = "one before" if before > after else "next one"
        raise TeacherError(
            f"{client.address}: its scores are off by one position: of the tokens that it writes as the likeliest, {own:.0%} are "
            f"scored best at their own place, and {max(before, after):.0%} at the {where}; look at "
            "how the server, or what stands before it, cuts its lists"
        )
    return own


def _fit(written: Sequence[int], scored: Sequence[int]) -> float:
    """Return the share of tokens that are the same, as far as both go."""
    pairs = list(zip(written, scored, strict=False))
    return sum(one == other for one, other in pairs) / len(pairs)


def served(client: JsonClient) -> tuple[tuple[str, ...], int | None]:
    """The ids of the models that a server offers, and the context of the first; nothing where it does not say."""
    try:
        answer = client.ask(JsonRequest("/v1/models", name="the list of models"))
    except RequestRefused as error:
        if error.status in (401, 403):
            raise
        return (), None
    try:
        entries: Sequence[Any] = answer["data"]
        names = tuple(client.shown(str(entry["id"]), LONGEST_ID) for entry in entries)
        length = entries[0].get("max_model_len") if entries else None
    except (LookupError, TypeError, AttributeError):
        raise TeacherError(
            f"{client.address}/v1/models: the answer is no list of models; look at what the address is"
        ) from None
    return names, length if isinstance(length, int) and length > 0 else None


def chosen_model(client: JsonClient, models: Sequence[str], wanted: str | None) -> str:
    """The model to ask: the wanted one, or the only one there is."""
    if wanted is not None and (wanted in models or not models):
        return wanted
    shown = ", ".join(models[:SHOWN_MODELS]) or "none that it names"
    if wanted is not None:
        raise TeacherError(
            f"{client.address}: no model {wanted!r} is served there; it has: {shown}"
        )
    if len(models) > 1:
        raise CapabilityError(
            f"{client.address}: {len(models)} models are served there; write model: one of {shown}"
        )
    return models[0] if models else "default"
