"""How servers are asked for log-probabilities of given tokens, and how they answer: vLLM, SGLang, and `echo` of OpenAI's.

Each dialect writes the body of a request and reads its answer; nothing here is believed yet (see `_checks`). Scores are asked at
temperature 1 with every other change of the distribution off, so that defaults of a server or of its model do not matter.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from practicum.remote.http import JsonRequest
from practicum.types import SampleRequest, SamplingParams, ScoreRequest

DialectName = Literal["auto", "vllm", "sglang", "echo", "chat"]

BYTES_A_CANDIDATE = 256
"""JSON of one candidate of one token, with room."""

Numbers = list[Any]


@dataclass(frozen=True, slots=True)
class ServerScores:
    """What a server says about T tokens, in the form the dialects share and unchecked.

    `ids` are the tokens it believes it scored (None: it does not say), `top` its K likeliest tokens with their
    log-probabilities in its own order, and `texts` the text of tokens, for comparing vocabularies.
    """

    logprobs: Numbers
    ids: Numbers | None
    top: list[list[tuple[Any, Any]]]
    texts: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServerCompletion:
    """An answer that a server wrote: token ids and their log-probabilities where it gives them, its text, and how it ended."""

    text: str
    stopped: bool
    tokens: list[int] | None = None
    logprobs: list[float] | None = None
    stop_token: int | None = None


@runtime_checkable
class Dialect(Protocol):
    """One way of asking; `name` is how a recipe writes it."""

    name: str

    def scoring(
        self, model: str, request: ScoreRequest, k: int, temperature: float = 1.0
    ) -> JsonRequest:
        """The question for the log-probabilities of a request's tokens and of the k likeliest at each."""
        ...

    def said(self, answer: Any, request: ScoreRequest, k: int) -> ServerScores:
        """What the answer says about the request's tokens; LookupError, TypeError or ValueError where it has another form."""
        ...

    def writing(self, model: str, request: SampleRequest, params: SamplingParams) -> JsonRequest:
        """The question for an answer of the server's own."""
        ...

    def written(self, answer: Any) -> ServerCompletion:
        """What it wrote."""
        ...


def _make_neutral_sampling(temperature: float) -> dict[str, Any]:
    """Nothing that changes a distribution."""
    return {
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
    }


def _drawn(params: SamplingParams) -> dict[str, Any]:
    return _make_neutral_sampling(params.temperature) | {
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
    }


def _largest(tokens: int, k: int) -> int:
    return (1 << 18) + tokens * (k + 2) * BYTES_A_CANDIDATE


class Vllm:
    """`/v1/completions` with `prompt_logprobs`. One token must be generated, so the context is one shorter than it says."""

    name = "vllm"

    def scoring(
        self, model: str, request: ScoreRequest, k: int, temperature: float = 1.0
    ) -> JsonRequest:
        """Every position of the prompt comes back; the server cannot be asked for the last ones alone."""
        ids = [*request.prompt_tokens, *request.tokens]
        body = {
            "model": model,
            "prompt": ids,
            "max_tokens": 1,
            "prompt_logprobs": k,
            **_make_neutral_sampling(temperature),
        }
        return JsonRequest("/v1/completions", body, largest=_largest(len(ids), k))

    def said(self, answer: Any, request: ScoreRequest, k: int) -> ServerScores:
        """Positions hold candidates by id, the asked token always among them."""
        rows = answer["choices"][0]["prompt_logprobs"]
        if len(rows) != len(request.prompt_tokens) + len(request.tokens):
            raise ValueError(
                f"{len(rows)} positions instead of {len(request.prompt_tokens) + len(request.tokens)}"
            )
        rows = [
            {int(token): entry for token, entry in row.items()}
            for row in rows[len(request.prompt_tokens) :]
        ]
        texts = {
            token: entry["decoded_token"]
            for row in rows
            for token, entry in row.items()
            if isinstance(entry.get("decoded_token"), str)
        }
        own = [row.get(token) for row, token in zip(rows, request.tokens, strict=True)]
        top = [
            sorted(((token, e["logprob"]) for token, e in row.items()), key=_likeliest)[:k]
            for row in rows
        ]
        ids = [
            None if entry is None else token
            for entry, token in zip(own, request.tokens, strict=True)
        ]
        return ServerScores(
            [None if entry is None else entry["logprob"] for entry in own], ids, top, texts
        )

    def writing(self, model: str, request: SampleRequest, params: SamplingParams) -> JsonRequest:
        """Token ids in, token ids out."""
        body = {
            "model": model,
            "prompt": list(request.prompt_tokens),
            "max_tokens": params.max_new_tokens,
            "seed": request.seed % 2**63,
            "logprobs": 0,
            "return_token_ids": True,
            "stop_token_ids": sorted(params.stop_ids),
            **_drawn(params),
        }
        return JsonRequest("/v1/completions", body, largest=_largest(params.max_new_tokens, 2))

    def written(self, answer: Any) -> ServerCompletion:
        """`stop_reason` is the token that ended it, where that is none of the model's own."""
        choice = answer["choices"][0]
        tokens, about = choice.get("token_ids"), choice.get("logprobs")
        stop = choice.get("stop_reason")
        return ServerCompletion(
            str(choice["text"]),
            choice["finish_reason"] == "stop",
            tokens,
            about["token_logprobs"] if tokens and about else None,
            stop if isinstance(stop, int) else None,
        )


class Sglang:
    """The native `/generate` with `return_logprob`, from the last prompt token on."""

    name = "sglang"

    def scoring(
        self, model: str, request: ScoreRequest, k: int, temperature: float = 1.0
    ) -> JsonRequest:
        """Only the tokens that are asked about come back, after one without a log-probability."""
        ids = [*request.prompt_tokens, *request.tokens]
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 1, **_make_neutral_sampling(temperature)},
            "return_logprob": True,
            "logprob_start_len": max(len(request.prompt_tokens) - 1, 0),
            "top_logprobs_num": k,
            "return_text_in_logprobs": True,
        }
        return JsonRequest("/generate", body, largest=_largest(len(ids), k))

    def said(self, answer: Any, request: ScoreRequest, k: int) -> ServerScores:
        """Positions hold `[logprob, id, text]`, and lists of them."""
        about, count = answer["meta_info"], len(request.tokens)
        rows = _last(about["input_token_logprobs"], count)
        top = _last(about["input_top_logprobs"], count) if k else [[] for _ in rows]
        texts = {id_: text for row in [rows, *top] for _, id_, text in row if isinstance(text, str)}
        return ServerScores(
            [row[0] for row in rows],
            [row[1] for row in rows],
            [[(e[1], e[0]) for e in r] for r in top],
            texts,
        )

    def writing(self, model: str, request: SampleRequest, params: SamplingParams) -> JsonRequest:
        """Token ids in, token ids out; the server takes no seed."""
        body = {
            "input_ids": list(request.prompt_tokens),
            "sampling_params": {
                "max_new_tokens": params.max_new_tokens,
                "stop_token_ids": sorted(params.stop_ids),
                **_drawn(params),
            },
            "return_logprob": True,
        }
        return JsonRequest("/generate", body, largest=_largest(params.max_new_tokens, 2))

    def written(self, answer: Any) -> ServerCompletion:
        """`finish_reason` holds what it matched."""
        about, reason = answer["meta_info"], answer["meta_info"]["finish_reason"]
        rows = about["output_token_logprobs"]
        matched = reason.get("matched")
        return ServerCompletion(
            str(answer["text"]),
            reason["type"] == "stop",
            [row[1] for row in rows],
            [row[0] for row in rows],
            matched if isinstance(matched, int) else None,
        )


class Echo:
    """`/v1/completions` with `echo` and `logprobs`, as OpenAI's old models had it.

    Candidates are texts in it, so there are none, unless the server writes them as `token_id:17` when asked to.
    """

    name = "echo"

    def scoring(
        self, model: str, request: ScoreRequest, k: int, temperature: float = 1.0
    ) -> JsonRequest:
        """One generated token is asked for, because some servers refuse none, and cut off."""
        ids = [*request.prompt_tokens, *request.tokens]
        body = {
            "model": model,
            "prompt": ids,
            "max_tokens": 1,
            "echo": True,
            "logprobs": max(k, 1),
            "return_tokens_as_token_ids": True,
            "temperature": temperature,
            "top_p": 1.0,
        }
        return JsonRequest("/v1/completions", body, largest=_largest(len(ids), k))

    def said(self, answer: Any, request: ScoreRequest, k: int) -> ServerScores:
        """Four lists side by side: prompt first, then what was generated."""
        about = answer["choices"][0]["logprobs"]
        begin, end = len(request.prompt_tokens), len(request.prompt_tokens) + len(request.tokens)
        words, logprobs = about["tokens"][begin:end], about["token_logprobs"]
        if len(about["tokens"]) not in (end, end + 1) or len(logprobs) != len(about["tokens"]):
            raise ValueError(f"{len(about['tokens'])} tokens instead of {end}")
        numbers = [_token_id(word) for word in words]
        if any(number is None for number in numbers):
            texts = dict(zip(request.tokens, map(str, words), strict=True))
            return ServerScores(logprobs[begin:end], None, [[] for _ in words], texts)
        rows = about.get("top_logprobs") or [{} for _ in about["tokens"]]
        top = [
            sorted(((_token_id(w), value) for w, value in row.items()), key=_likeliest)[:k]
            for row in rows[begin:end]
        ]
        return ServerScores(logprobs[begin:end], numbers, top)

    def writing(self, model: str, request: SampleRequest, params: SamplingParams) -> JsonRequest:
        """Token ids in, text out."""
        asked = {"prompt": list(request.prompt_tokens)}
        return _writing("/v1/completions", model, asked, request.seed, params)

    def written(self, answer: Any) -> ServerCompletion:
        """Text alone."""
        choice = answer["choices"][0]
        return ServerCompletion(str(choice["text"]), choice["finish_reason"] == "stop")


DIALECTS: tuple[Dialect, ...] = (Vllm(), Sglang(), Echo())


def build_chat_request(
    model: str, messages: Sequence[Mapping[str, str]], seed: int, params: SamplingParams
) -> JsonRequest:
    """The question for an answer to messages, in the server's own template."""
    asked = {"messages": [dict(message) for message in messages]}
    return _writing("/v1/chat/completions", model, asked, seed, params)


def _writing(
    path: str, model: str, asked: Mapping[str, Any], seed: int, params: SamplingParams
) -> JsonRequest:
    """Return the question for an answer in the words that all of OpenAI's servers know; their seeds have 31 bits."""
    body = {
        "model": model,
        **asked,
        "max_tokens": params.max_new_tokens,
        "seed": seed % 2**31,
        "temperature": params.temperature,
        "top_p": params.top_p,
    }
    return JsonRequest(path, body, largest=_largest(params.max_new_tokens, 2))


def parse_chat_completion(answer: Any) -> ServerCompletion:
    """What the server said in answer to messages."""
    choice = answer["choices"][0]
    return ServerCompletion(
        str(choice["message"]["content"] or ""), choice["finish_reason"] == "stop"
    )


def answered_by(answer: Any) -> str | None:
    """Return the name of the model that an answer says it is from."""
    name = answer.get("model") if isinstance(answer, dict) else None
    return name if isinstance(name, str) else None


def _likeliest(candidate: tuple[Any, Any]) -> tuple[Any, Any]:
    """Orders candidates by their log-probability; what is no number comes last, for it is judged elsewhere."""
    token, logprob = candidate
    return (-logprob if isinstance(logprob, int | float) else math.inf), token


def _last(rows: Any, count: int) -> list[Any]:
    """The last `count` rows; ValueError where there are fewer."""
    if len(rows) < count:
        raise ValueError(f"{len(rows)} positions instead of {count}")
    return list(rows[len(rows) - count :])


def _token_id(word: Any) -> int | None:
    """The number of `token_id:17`."""
    name, _, number = str(word).partition(":")
    return int(number) if name == "token_id" and number.isdecimal() else None
