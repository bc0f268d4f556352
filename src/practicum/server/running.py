"""What sampling and scoring requests come to, on the thread that holds the models."""

import json
import logging
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from practicum.core.randomness import seed_of
from practicum.errors import DataError, PracticumError
from practicum.ports.hosting import Hosted, PromptQuestion, PromptScores, Reader, Weights
from practicum.server.futures import Answer
from practicum.server.refusals import HttpRefusal
from practicum.server.requests import SampleBody, TensorData
from practicum.server.shelf import ModelCache
from practicum.server.store import Store
from practicum.server.training import AdapterSpec, check_token_ids
from practicum.server.wire import (
    PROTOBUF,
    SampleAnswer,
    Sparse,
    TopKTable,
    dense_of_csr,
    sample_response,
)
from practicum.server.worker import Steps
from practicum.types import Sample, SampleRequest, SamplingParams

T = TypeVar("T")
Pausing = Generator[None, None, T]
"""Work that pauses where other work can be done in between."""

MOST_CELLS = 2**24
"""Entries of one table of an answer: tokens times candidates."""

SCORED_AT_ONCE = 8192
"""Tokens of prompts that are scored before other work has its turn."""

LANES = (2**8, 2**12, 2**16)
"""Tokens to read and to write up to which requests share a lane; what is larger has the last."""

OVERLAYS_KEPT = 8
"""So many sets of saved adapters stay in memory after they were sampled from."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Published:
    """Adapters in memory under a name. Those of a snapshot stay as they are; those that are in flight are exchanged."""

    name: str
    weights: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Sampler:
    """What a sampling session samples from: a base model, or adapters over it that are in memory or saved."""

    id: str
    base: str
    spec: AdapterSpec | None = None
    published: Published | None = None
    path: str | None = None

    @property
    def key(self) -> str:
        """What tells two sets of weights apart."""
        return self.path or (f"base {self.base}" if self.published is None else self.published.name)


@dataclass(frozen=True, slots=True)
class SampleItem:
    """One sampling request."""

    body: SampleBody
    tokens: tuple[int, ...]
    sampler: Sampler
    seed: int

    @property
    def asks(self) -> bool:
        """Whether anything about the prompt is asked."""
        body = self.body
        wanted = (
            body.prompt_logprobs,
            body.topk_prompt_logprobs,
            body.target_prompt_logprobs,
            body.prompt_alt_tokens_k,
        )
        return any(wanted)

    @property
    def lane(self) -> int:
        """Among requests of which size it waits; one that draws to the end of the context counts as large."""
        most = self.body.sampling_params.max_tokens
        if most is None:
            return len(LANES)
        size = self.asks * len(self.tokens) + self.body.num_samples * most
        return bisect_left(LANES, size)

    @property
    def one_pass(self) -> bool:
        """Whether reading the prompt answers all of it."""
        return self.asks and self.body.sampling_params.max_tokens == 1


@dataclass(slots=True)
class _Request:
    """How one request is carried out, and what it has come to so far."""

    item: SampleItem
    number: int
    params: SamplingParams
    seeds: tuple[int, ...]
    question: PromptQuestion | None = None
    named: Tensor | None = None
    scores: PromptScores | None = None
    samples: Sequence[Sample] = ()
    topk: list[TopKTable] | None = None


class SamplingExecutor:
    """Carries out batches of sampling requests; used on the worker's thread alone."""

    def __init__(self, shelf: ModelCache, store: Store, most_tokens: int) -> None:
        self._shelf = shelf
        self._store = store
        self._most_tokens = most_tokens
        self._trees: dict[tuple[str, int, tuple[str, ...]], Reader] = {}
        self._overlays: OrderedDict[str, Mapping[str, Tensor]] = OrderedDict()
        shelf.evicted.append(self._evicted)

    def answer(self, items: Sequence[SampleItem]) -> Steps:
        """Work out one answer a request, in order, with pauses in which other work may be done.

        All are about the same weights; one that cannot be done fails alone.
        """
        start = time.monotonic()
        sampler = items[0].sampler
        loaded = self._shelf.get(sampler.base)
        model, overlay = self._weights(sampler, loaded)
        requests: list[_Request] = []
        answers: dict[int, Answer] = {}
        for number, item in enumerate(items):
            try:
                requests.append(_planned(item, number, loaded, self._most_tokens))
            except DataError as error:
                answers[number] = failure(error)
        yield from _score(model, overlay, requests)
        yield from _draw(model, overlay, requests)
        yield from _score_drawn(model, overlay, requests)
        for request in requests:
            greedy = request.params.temperature == 0
            answers[request.number] = Answer(
                sample_response(_assembled(request), greedy=greedy), PROTOBUF
            )
        _report(sampler.base, requests, time.monotonic() - start)
        return [answers[number] for number in range(len(items))]

    def _weights(self, sampler: Sampler, loaded: Hosted) -> tuple[Reader, Weights]:
        """The modules and the weights that stand in for theirs."""
        spec = sampler.spec
        if spec is None:
            return loaded.reader(), None
        shape = spec.base, spec.rank, spec.parts
        if shape not in self._trees:
            self._trees[shape] = spec.build(loaded).reader()
        published = sampler.published
        return self._trees[shape], self._saved(
            sampler, loaded
        ) if published is None else published.weights

    def _saved(self, sampler: Sampler, loaded: Hosted) -> Mapping[str, Tensor]:
        assert sampler.path is not None
        if sampler.path not in self._overlays:
            tensors = self._store.load(sampler.path).tensors("student")
            self._overlays[sampler.path] = loaded.reader().bring(tensors)
            while len(self._overlays) > OVERLAYS_KEPT:
                self._overlays.popitem(last=False)
        self._overlays.move_to_end(sampler.path)
        return self._overlays[sampler.path]

    def forget(self, path: str) -> None:
        """Read a checkpoint again when it is next sampled from: it was written anew."""
        self._overlays.pop(path, None)

    def _evicted(self, base: str) -> None:
        self._trees = {shape: tree for shape, tree in self._trees.items() if shape[0] != base}


def _report(name: str, requests: Sequence[_Request], seconds: float) -> None:
    """Note what was read and written for some requests."""
    read = sum(request.question.rows for request in requests if request.question is not None)
    written = sum(
        len(one.tokens)
        for request in requests
        if not request.item.one_pass
        for one in request.samples
    )
    parts = [f"scored {read:,} tokens"] * bool(read) + [f"wrote {written:,} tokens"] * bool(written)
    log.info(
        f"{name}: {len(requests)} requests, {', '.join(parts) or 'nothing to do'}, {seconds:.2f} s"
    )


def _score(model: Reader, overlay: Weights, requests: Sequence[_Request]) -> Pausing[None]:
    """Answer what is asked about prompts; where one pass answers all, also with the samples."""
    asked = [(request, request.question) for request in requests if request.question is not None]
    scores = yield from _scores(model, overlay, [question for _, question in asked])
    for (request, _), own in zip(asked, scores, strict=True):
        request.scores, request.samples = own, own.following


def _draw(model: Reader, overlay: Weights, requests: Sequence[_Request]) -> Pausing[None]:
    """Draw the completions of requests that have none; those that draw alike are decoded together."""
    alike: dict[str, list[_Request]] = {}
    for request in requests:
        if not request.samples:
            alike.setdefault(_make_batch_key(request.item), []).append(request)
    for group in alike.values():
        asked = [
            SampleRequest(request.item.tokens, seed) for request in group for seed in request.seeds
        ]
        samples = yield from model.draw(asked, group[0].params, overlay)
        following = iter(samples)
        for request in group:
            request.samples = [next(following) for _ in request.seeds]


def _score_drawn(model: Reader, overlay: Weights, requests: Sequence[_Request]) -> Pausing[None]:
    """Find the likeliest tokens at each drawn one, read off in a pass over what was written."""
    asked = [
        (request, (*request.item.tokens, *sample.tokens.tolist()))
        for request in requests
        if request.item.body.topk_sample_logprobs
        for sample in request.samples
    ]
    questions = [
        PromptQuestion(tokens, len(request.item.tokens), request.item.body.topk_sample_logprobs)
        for request, tokens in asked
    ]
    scored = yield from _scores(model, overlay, questions)
    for (request, _), scores in zip(asked, scored, strict=True):
        request.topk = [*(request.topk or []), TopKTable(scores.topk_ids, scores.topk_logprobs)]


def _scores(
    model: Reader, overlay: Weights, questions: Sequence[PromptQuestion]
) -> Pausing[list[PromptScores]]:
    """Answer questions about prompts, with a pause after each `SCORED_AT_ONCE` tokens."""
    found: list[PromptScores] = []
    part: list[PromptQuestion] = []
    for number, question in enumerate(questions):
        part.append(question)
        if number + 1 == len(questions) or sum(len(one.tokens) for one in part) >= SCORED_AT_ONCE:
            found += model.score(part, overlay)
            part = []
            yield
    return found


def failure(error: PracticumError | HttpRefusal) -> Answer:
    """The answer to a request that cannot be carried out as it was asked."""
    return json_answer({"error": " ".join(str(error).split()), "category": "user"})


def json_answer(value: Mapping[str, object]) -> Answer:
    """A finished answer in JSON."""
    return Answer(json.dumps(value, allow_nan=False).encode(), "application/json")


def _planned(item: SampleItem, number: int, loaded: Hosted, most_tokens: int) -> _Request:
    """How a request is carried out with a model; DataError where it cannot be."""
    body, count, vocabulary = item.body, len(item.tokens), loaded.vocab_size
    context = loaded.context_length
    if not 1 <= count <= context:
        raise DataError(f"the prompt has {count} tokens, and the model reads 1 to {context}")
    check_token_ids(item.tokens, vocabulary, "prompt")
    most = body.sampling_params.max_tokens or max(context - count, 1)
    if count + most - 1 > context:  # the last token that is drawn is not read
        raise DataError(
            f"{count} tokens of prompt and max_tokens {most} do not fit in the context of {context}"
        )
    check_tokens(body.num_samples, most, most_tokens)
    params = _params(item, loaded, most)
    # The first sample of a request is the one that its seed gives without a service, so that a run here and there is the same.
    seeds = (item.seed, *(seed_of(item.seed, number) for number in range(1, body.num_samples)))
    last = body.prompt_logprobs_last_n
    if last is not None and not (body.prompt_logprobs and last <= count - 1):
        raise DataError(
            f"prompt_logprobs_last_n is {last}: it needs prompt_logprobs and at most the {count - 1} tokens after the first"
        )
    if not item.asks:
        return _Request(item, number, params, seeds)
    named = (
        None
        if body.target_prompt_logprobs is None
        else _named(body.target_prompt_logprobs, count, vocabulary)
    )
    for width in (body.topk_prompt_logprobs, body.prompt_alt_tokens_k):
        if width * count > MOST_CELLS:
            raise DataError(
                f"{count} tokens times {width} candidates are more than {MOST_CELLS}; ask for fewer"
            )
    begins = []
    if body.prompt_logprobs or body.topk_prompt_logprobs:
        begins.append(1 if last is None else count - last)
    if body.prompt_alt_tokens_k:
        begins.append(1)
    if named is not None:
        begins += [int(row) + 1 for row in (named >= 0).any(dim=1).nonzero()[:1, 0]]
    first = min([*begins, count])
    question = PromptQuestion(
        tokens=item.tokens,
        first=first,
        topk=min(body.topk_prompt_logprobs, vocabulary),
        targets=None if named is None else named[first - 1 :],
        draws=body.prompt_alt_tokens_k,
        temperature=body.sampling_params.temperature,
        seed=item.seed,
        following=seeds if most == 1 else (),
        params=params,
    )
    return _Request(item, number, params, seeds, question, named)


def check_tokens(samples: int, most: int, limit: int) -> None:
    """DataError where so many samples of so many tokens are more than one request may ask for."""
    if samples * most > limit:
        raise DataError(
            f"num_samples {samples} times max_tokens {most} is more than the {limit} tokens that a request may draw; ask for "
            f"at most {limit // most} samples, or for the rest in other requests"
        )


def _make_batch_key(item: SampleItem) -> str:
    """What requests share that are decoded together: all settings but the seed, and where they end."""
    asked = item.body.sampling_params
    end = asked.max_tokens or -len(item.tokens)
    return f"{end} {asked.model_copy(update={'seed': None}).model_dump_json()}"


def _params(item: SampleItem, loaded: Hosted, most: int) -> SamplingParams:
    asked = item.body.sampling_params
    params = SamplingParams(
        most, asked.temperature, asked.top_p, max(asked.top_k, 0), loaded.renderer.stop_ids
    )
    if asked.stop is None:
        return params
    stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop
    texts = tuple(stop for stop in stops if isinstance(stop, str))
    if "" in texts:
        raise DataError("stop holds an empty text, which every answer begins with; leave it out")
    ids = frozenset(stop for stop in stops if isinstance(stop, int))
    return replace(params, stop_ids=ids, stop_texts=texts)


def _named(given: TensorData, count: int, vocabulary: int) -> Tensor:
    """The token ids whose log-probabilities are asked, [N - 1, K], -1 where nothing is."""
    shape = given.shape or []
    if (
        len(shape) != 2
        or shape[0] != count - 1
        or not 1 <= shape[1] * max(shape[0], 1) <= MOST_CELLS
    ):
        raise DataError(
            f"target_prompt_logprobs has the shape {shape}, not [{count - 1}, K]: one row for each token after the first"
        )
    values = np.asarray(given.data, dtype=np.int64)
    if given.sparse_crow_indices is not None:
        crow = np.asarray(given.sparse_crow_indices, dtype=np.int64)
        columns = np.asarray(given.sparse_col_indices or [], dtype=np.int64)
        named = dense_of_csr(values, crow, columns, shape, -1, "target_prompt_logprobs")
    elif values.size == shape[0] * shape[1]:
        named = torch.from_numpy(values).view(tuple(shape))
    else:
        raise DataError(
            f"target_prompt_logprobs has {values.size} values, not those of the shape {shape}"
        )
    if named.numel() and not -1 <= int(named.min()) <= int(named.max()) < vocabulary:
        raise DataError(
            f"target_prompt_logprobs names tokens that are not among the {vocabulary} of the vocabulary"
        )
    return named


def _assembled(request: _Request) -> SampleAnswer:
    """The answer with every table at its full length, empty where nothing was asked or there is nothing before."""
    body, count, scores = request.item.body, len(request.item.tokens), request.scores
    if scores is None:
        return SampleAnswer(request.samples, request.topk)
    assert request.question is not None
    shown = count - (body.prompt_logprobs_last_n or count - 1)
    before = request.question.first
    logprobs = torch.full((count,), torch.nan)
    logprobs[before:] = scores.logprobs
    logprobs[:shown] = torch.nan
    table = None
    if body.topk_prompt_logprobs:
        ids = torch.full((count, scores.topk_ids.shape[1]), -1)
        values = torch.zeros(ids.shape)
        ids[before:], values[before:] = scores.topk_ids, scores.topk_logprobs
        ids[:shown] = -1
        table = TopKTable(ids, values)
    targets, sparse = _targets(request, request.question, scores)
    return SampleAnswer(
        samples=request.samples,
        sample_topk=request.topk,
        prompt_logprobs=logprobs if body.prompt_logprobs else None,
        prompt_topk=table,
        targets=targets,
        sparse=sparse,
        drawn=TopKTable(scores.drawn, scores.drawn_logprobs) if body.prompt_alt_tokens_k else None,
    )


def _targets(
    request: _Request, question: PromptQuestion, scores: PromptScores
) -> tuple[Tensor | None, Sparse | None]:
    """The log-probabilities of the named tokens in the layout in which they were named."""
    given = request.item.body.target_prompt_logprobs
    if given is None or request.named is None or scores.target_logprobs is None:
        return None, None
    whole = torch.zeros(request.named.shape)
    whole[question.first - 1 :] = scores.target_logprobs
    if given.sparse_crow_indices is None or given.sparse_col_indices is None:
        return whole, None
    counts = torch.tensor(given.sparse_crow_indices).diff()
    rows = torch.arange(len(counts)).repeat_interleave(counts)
    values = whole[rows, torch.tensor(given.sparse_col_indices, dtype=torch.long)]
    return values, Sparse(
        given.sparse_crow_indices, given.sparse_col_indices, list(request.named.shape)
    )
