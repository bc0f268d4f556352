"""The requests and answers of servers that score given tokens: vLLM, SGLang and OpenAI's `echo`.

Each dialect builds the body of a request and parses its answer; `checks` validates the scores.
Scores are requested at temperature 1 without any other change of the distribution, so that the
defaults of a server or of its model do not matter.
"""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from practicum.remote.http import JsonRequest
from practicum.types import Message, SampleRequest, SamplingParams, ScoreRequest

DialectName = Literal["auto", "vllm", "sglang", "echo", "chat"]

WHOLE = 1 << 30
"""The block of a server that is told the candidates of each token: a text of any length."""

BYTES_A_CANDIDATE = 256
"""Bytes of JSON for one candidate of one token, rounded up."""

Numbers = list[Any]


@dataclass(frozen=True, slots=True)
class ServerScores:
    """A server's scores of T tokens in the form that the dialects share, unchecked.

    `ids` are the tokens that the server claims to have scored (None: it does not say). `top` are
    its top K tokens with their log-probabilities, in the server's order. `texts` holds the text of
    some tokens, for comparing vocabularies.
    """

    logprobs: Numbers
    ids: Numbers | None
    top: list[list[tuple[Any, Any]]]
    texts: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServerCompletion:
    """A completion that a server sampled: its text, and token ids and log-probabilities if sent.

    `messages` is the conversation that a server answered with its own chat template; None if the
    server continued the tokens of a prompt.
    """

    text: str
    is_stopped: bool
    tokens: list[int] | None = None
    logprobs: list[float] | None = None
    stop_token: int | None = None
    messages: Sequence[Message] | None = None


@runtime_checkable
class Dialect(Protocol):
    """The request and answer format of a kind of server.

    `name` is its name in a recipe. `launch` holds the recommended flags for a server that scores,
    and `states_launch` the flags for a server that also writes hidden states; both may be empty.
    `block` is the number of tokens for which one request can name candidates: 0 if requests cannot
    name candidates, and small if all tokens of a request share the same candidates.
    """

    name: str
    launch: str
    states_launch: str
    block: int

    def build_score_request(
        self, model: str, request: ScoreRequest, k: int, temperature: float = 1.0
    ) -> JsonRequest:
        """Return the request for log-probabilities of the tokens and of the top k at each."""
        ...

    def parse_scores(self, answer: Any, request: ScoreRequest, k: int) -> ServerScores:
        """Return the scores in an answer.

        LookupError, TypeError, ValueError or AttributeError if the answer has another form.
        """
        ...

    def build_naming_request(
        self, model: str, request: ScoreRequest, temperature: float = 1.0
    ) -> JsonRequest:
        """Return the request for log-probabilities of the tokens and of the request's candidates."""
        ...

    def parse_named(self, answer: Any, request: ScoreRequest) -> ServerScores:
        """Return the scores in an answer, most likely candidate first; errors as above."""
        ...

    def build_sample_request(
        self, model: str, request: SampleRequest, params: SamplingParams
    ) -> JsonRequest:
        """Return the request for a completion."""
        ...

    def parse_completion(self, answer: Any) -> ServerCompletion:
        """Return the completion in an answer; errors as in `parse_scores`."""
        ...


def _build_neutral_sampling(temperature: float) -> dict[str, Any]:
    """Return body fields that leave the distribution unchanged except for the temperature."""
    penalties = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    return {"temperature": temperature, "top_p": 1.0, "top_k": -1, "min_p": 0.0, **penalties}


def _build_sampling(params: SamplingParams) -> dict[str, Any]:
    cut = {"top_p": params.top_p, "top_k": params.top_k or -1}
    return _build_neutral_sampling(params.temperature) | cut | _build_ban(params)


def _build_ban(params: SamplingParams) -> dict[str, Any]:
    """Return the field that bans tokens; empty if no token is banned.

    OpenAI's bias of -100 on a logit bans a token.
    """
    if not params.banned_ids:
        return {}
    return {"logit_bias": {str(token): -100.0 for token in sorted(params.banned_ids)}}


def _build_request(path: str, body: Mapping[str, Any], tokens: int, k: int = 2) -> JsonRequest:
    """Return a request that allows an answer with scores of `tokens` with `k` candidates each."""
    largest = (1 << 18) + tokens * (k + 2) * BYTES_A_CANDIDATE
    return JsonRequest(path, body, max_answer_bytes=largest)


class Vllm:
    """`/v1/completions` with `prompt_logprobs`.

    The server must generate one token, so the usable context is one token shorter than its limit.
    """

    name = "vllm"
    # The last flag bounds the rows of logits that one batch holds: prompts are scored in chunks.
    launch = "--max-logprobs K --logprobs-mode raw_logprobs --max-num-batched-tokens 2048"
    block = WHOLE
    states_launch = (
        '--speculative-config \'{"method": "extract_hidden_states", "num_speculative_tokens": 1, '
        '"draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [LAYERS]}}}\' '
        '--kv-transfer-config \'{"kv_connector": "ExampleHiddenStatesConnector", "kv_role": '
        '"kv_producer", "kv_connector_extra_config": {"shared_storage_path": "FOLDER"}}\''
    )

    def build_score_request(
        self, model: str, request: ScoreRequest, k: int, temperature: float = 1.0
    ) -> JsonRequest:
        """Ask for every position: the server cannot return only the last positions."""
        ids = [*request.prompt_tokens, *request.tokens]
        body = {"model": model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": k}
        body |= _build_neutral_sampling(temperature)
        return _build_request("/v1/completions", body, len(ids), k)

    def parse_scores(self, answer: Any, request: ScoreRequest, k: int) -> ServerScores:
        """Parse positions that map ids to candidates; the scored token is always one of them."""
        start, count = len(request.prompt_tokens), len(request.tokens)
        rows = answer["choices"][0]["prompt_logprobs"]
        if len(rows) != start + count:
            raise ValueError(f"{len(rows)} positions instead of {start + count}")
        rows = [{int(token): entry for token, entry in row.items()} for row in rows[start:]]
        entries = [row.get(token) for row, token in zip(rows, request.tokens, strict=True)]
        top, texts = [], {}
        for row in rows:
            decoded = {token: entry.get("decoded_token") for token, entry in row.items()}
            texts |= {token: text for token, text in decoded.items() if isinstance(text, str)}
            candidates = [(token, entry["logprob"]) for token, entry in row.items()]
            # If the scored token is not among the top k, it is returned in addition to them.
            top.append(sorted(candidates, key=_rank_candidate)[:k])
        pairs = zip(entries, request.tokens, strict=True)
        ids = [None if entry is None else token for entry, token in pairs]
        logprobs = [None if entry is None else entry["logprob"] for entry in entries]
        return ServerScores(logprobs, ids, top, texts)

    def build_naming_request(
        self, model: str, request: ScoreRequest, temperature: float = 1.0
    ) -> JsonRequest:
        """Name the ids of each position: the token itself first, then its candidates."""
        ids = [*request.prompt_tokens, *request.tokens]
        sampling = {"max_tokens": 1, **_build_neutral_sampling(temperature)}
        # Row i scores the token after position `prompt_logprob_start + i`.
        sampling["prompt_logprob_start"] = len(request.prompt_tokens) - 1
        sampling["prompt_logprob_token_ids"] = [
            [token, *row] for token, row in zip(request.tokens, _list_named(request), strict=True)
        ]
        body = {"model": model, "token_ids": ids, "sampling_params": sampling}
        return _build_request("/inference/v1/generate", body, len(ids), 2)

    def parse_named(self, answer: Any, request: ScoreRequest) -> ServerScores:
        """Parse a table in numpy's own format, as base64, with the rows and columns of the request."""
        data = base64.b64decode(answer["prompt_token_id_logprobs"], validate=True)
        try:
            table = np.load(io.BytesIO(data), allow_pickle=False)
        except EOFError as error:
            raise ValueError("an empty table") from error
        named = _list_named(request)
        if table.shape != (len(named), len(named[0]) + 1):
            raise ValueError(f"a table of {table.shape} instead of {len(named)} rows")
        rows = [[float(number) for number in row] for row in table]
        top = [
            sorted(zip(ids, row[1:], strict=True), key=_rank_candidate)
            for ids, row in zip(named, rows, strict=True)
        ]
        return ServerScores([row[0] for row in rows], list(request.tokens), top)

    def build_sample_request(
        self, model: str, request: SampleRequest, params: SamplingParams
    ) -> JsonRequest:
        """Send token ids and ask for token ids."""
        body = {
            "model": model,
            "prompt": list(request.prompt_tokens),
            "max_tokens": params.max_new_tokens,
            "seed": request.seed % 2**63,
        }
        body |= {"logprobs": 0, "return_token_ids": True, "stop_token_ids": sorted(params.stop_ids)}
        body |= _build_sampling(params)
        return _build_request("/v1/completions", body, params.max_new_tokens)

    def parse_completion(self, answer: Any) -> ServerCompletion:
        """Parse token ids; `stop_reason` is the token that ended them, if the request named it."""
        choice = answer["choices"][0]
        tokens, scores = choice.get("token_ids"), choice.get("logprobs")
        stop = choice.get("stop_reason")
        return ServerCompletion(
            str(choice["text"]),
            choice["finish_reason"] == "stop",
            tokens,
            scores["token_logprobs"] if tokens and scores else None,
            stop if isinstance(stop, int) else None,
        )


class Sglang:
    """The native `/generate` with `return_logprob`, from the last prompt token on."""

    name = "sglang"
    launch = "--chunked-prefill-size 2048"
    states_launch = ""
    # All ids that a request names are scored at all of its positions, so long requests cost more.
    block = 32

    def build_score_request(
        self, model: str, request: ScoreRequest, k: int, temperature: float = 1.0
    ) -> JsonRequest:
        """Ask for only the completion's tokens, after one entry without a log-probability."""
        ids = [*request.prompt_tokens, *request.tokens]
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 1, **_build_neutral_sampling(temperature)},
            "return_logprob": True,
            # One token early: the first entry has no log-probability, so it must be the prompt's.
            "logprob_start_len": max(len(request.prompt_tokens) - 1, 0),
            "top_logprobs_num": k,
            "return_text_in_logprobs": True,
        }
        return _build_request("/generate", body, len(ids), k)

    def parse_scores(self, answer: Any, request: ScoreRequest, k: int) -> ServerScores:
        """Parse a position as `[logprob, id, text]`, and its candidates as a list of them."""
        meta, count = answer["meta_info"], len(request.tokens)
        rows = _take_last(meta["input_token_logprobs"], count)
        top = _take_last(meta["input_top_logprobs"], count) if k else [[] for _ in rows]
        texts: dict[int, str] = {}
        for row in (rows, *top):
            texts |= {token: text for _, token, text in row if isinstance(text, str)}
        return ServerScores(
            [row[0] for row in rows],
            [row[1] for row in rows],
            [[(token, logprob) for logprob, token, _ in row] for row in top],
            texts,
        )

    def build_naming_request(
        self, model: str, request: ScoreRequest, temperature: float = 1.0
    ) -> JsonRequest:
        """Name the union of all positions' ids."""
        plain = self.build_score_request(model, request, 0, temperature)
        union = sorted({token for row in _list_named(request) for token in row})
        body = {**(plain.body or {}), "token_ids_logprob": union}
        return _build_request(plain.path, body, len(request.tokens), len(union))

    def parse_named(self, answer: Any, request: ScoreRequest) -> ServerScores:
        """Parse the tokens as usual, and pick each position's candidates from the union."""
        plain = self.parse_scores(answer, request, 0)
        table = _take_last(answer["meta_info"]["input_token_ids_logprobs"], len(request.tokens))
        top = []
        for row, named in zip(table, _list_named(request), strict=True):
            scores = {token: logprob for logprob, token, _ in row}
            top.append(sorted(((token, scores[token]) for token in named), key=_rank_candidate))
        return ServerScores(plain.logprobs, plain.ids, top, plain.texts)

    def build_sample_request(
        self, model: str, request: SampleRequest, params: SamplingParams
    ) -> JsonRequest:
        """Send token ids and ask for token ids; the server takes no seed."""
        stops = sorted(params.stop_ids)
        sampling = {"max_new_tokens": params.max_new_tokens, "stop_token_ids": stops}
        sampling |= _build_sampling(params)
        ids = list(request.prompt_tokens)
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
        return _build_request("/generate", body, params.max_new_tokens)

    def parse_completion(self, answer: Any) -> ServerCompletion:
        """Parse token ids; `finish_reason` names the stop token that matched."""
        meta, reason = answer["meta_info"], answer["meta_info"]["finish_reason"]
        rows = meta["output_token_logprobs"]
        matched = reason.get("matched")
        return ServerCompletion(
            str(answer["text"]),
            reason["type"] == "stop",
            [row[1] for row in rows],
            [row[0] for row in rows],
            matched if isinstance(matched, int) else None,
        )


class Echo:
    """`/v1/completions` with `echo` and `logprobs`, as OpenAI's old models implement it.

    Its candidates are texts and cannot be used, unless the server writes them as `token_id:17` on
    request.
    """

    name = "echo"
    launch = ""
    states_launch = ""
    block = 0

    def build_score_request(
        self, model: str, request: ScoreRequest, k: int, temperature: float = 1.0
    ) -> JsonRequest:
        """Ask for one generated token and drop it, because some servers refuse to generate none."""
        ids = [*request.prompt_tokens, *request.tokens]
        body = {"model": model, "prompt": ids, "max_tokens": 1, "echo": True, "logprobs": max(k, 1)}
        body |= {"return_tokens_as_token_ids": True, "temperature": temperature, "top_p": 1.0}
        return _build_request("/v1/completions", body, len(ids), k)

    def parse_scores(self, answer: Any, request: ScoreRequest, k: int) -> ServerScores:
        """Parse four parallel lists: the prompt first, then the generated tokens."""
        scores = answer["choices"][0]["logprobs"]
        begin, end = len(request.prompt_tokens), len(request.prompt_tokens) + len(request.tokens)
        words, logprobs = scores["tokens"][begin:end], scores["token_logprobs"]
        if len(scores["tokens"]) not in (end, end + 1) or len(logprobs) != len(scores["tokens"]):
            raise ValueError(f"{len(scores['tokens'])} tokens instead of {end}")
        ids = [_parse_token_id(word) for word in words]
        if any(number is None for number in ids):
            texts = dict(zip(request.tokens, map(str, words), strict=True))
            return ServerScores(logprobs[begin:end], None, [[] for _ in words], texts)
        rows = scores.get("top_logprobs") or [{} for _ in scores["tokens"]]
        top = []
        for row in rows[begin:end]:
            candidates = [(_parse_token_id(word), logprob) for word, logprob in row.items()]
            top.append(sorted(candidates, key=_rank_candidate)[:k])
        return ServerScores(logprobs[begin:end], ids, top)

    def build_naming_request(
        self, model: str, request: ScoreRequest, temperature: float = 1.0
    ) -> JsonRequest:
        """Refuse: this dialect names no candidates."""
        raise AssertionError("a dialect without a block is asked for no candidates")

    def parse_named(self, answer: Any, request: ScoreRequest) -> ServerScores:
        """Refuse: this dialect names no candidates."""
        raise AssertionError("a dialect without a block is asked for no candidates")

    def build_sample_request(
        self, model: str, request: SampleRequest, params: SamplingParams
    ) -> JsonRequest:
        """Send token ids and ask for text."""
        prompt = {"prompt": list(request.prompt_tokens)}
        return _build_openai_request("/v1/completions", model, prompt, request.seed, params)

    def parse_completion(self, answer: Any) -> ServerCompletion:
        """Parse the text: there is nothing else."""
        choice = answer["choices"][0]
        return ServerCompletion(str(choice["text"]), choice["finish_reason"] == "stop")


DIALECTS: tuple[Dialect, ...] = (Vllm(), Sglang(), Echo())


def _build_openai_request(
    path: str, model: str, prompt: Mapping[str, Any], seed: int, params: SamplingParams
) -> JsonRequest:
    """Return a request with the fields that all OpenAI servers know; their seeds have 31 bits."""
    body = {"model": model, **prompt, "max_tokens": params.max_new_tokens, "seed": seed % 2**31}
    body |= {"temperature": params.temperature, "top_p": params.top_p, **_build_ban(params)}
    return _build_request(path, body, params.max_new_tokens)


def read_model_name(answer: Any) -> str | None:
    """Return the model that an answer names, or None."""
    name = answer.get("model") if isinstance(answer, dict) else None
    return name if isinstance(name, str) else None


def read_states_name(answer: Any) -> str | None:
    """Return the file name of the hidden states that an answer promises, None without a promise."""
    params = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
    path = params.get("hidden_states_path") if isinstance(params, dict) else None
    # Only the name counts: a server must not choose which files of this machine are read.
    name = PurePosixPath(path).name if isinstance(path, str) else ""
    return name if name.endswith(".safetensors") and name.isprintable() else None


def _rank_candidate(candidate: tuple[Any, Any]) -> tuple[Any, Any]:
    # Values that are not numbers come last: `checks` refuses them with a reason, so sorting must
    # not fail.
    token, logprob = candidate
    return (-logprob if isinstance(logprob, int | float) else math.inf), token


def _list_named(request: ScoreRequest) -> list[list[int]]:
    """Return the candidates of each token of a request that names them."""
    assert request.candidates is not None, "the request names no candidates"
    return request.candidates.tolist()


def _take_last(rows: Any, count: int) -> list[Any]:
    """Return the last `count` rows; ValueError if there are fewer."""
    if len(rows) < count:
        raise ValueError(f"{len(rows)} positions instead of {count}")
    return list(rows[len(rows) - count :])


def _parse_token_id(word: Any) -> int | None:
    """Return the number of `token_id:17`, or None."""
    name, _, number = str(word).partition(":")
    return int(number) if name == "token_id" and number.isdecimal() else None
