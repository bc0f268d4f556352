"""Execute sampling and scoring requests on the thread that holds the models."""

import json
import logging
import time
import traceback
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
from practicum.server.futures import ResponseBody
from practicum.server.model_cache import ModelCache
from practicum.server.refusals import HttpRefusal
from practicum.server.requests import MAX_CANDIDATES, SampleBody, TensorData
from practicum.server.store import Store
from practicum.server.training import AdapterSpec, check_token_ids
from practicum.server.wire import (
    PROTOBUF,
    SampleAnswer,
    SparseLayout,
    TopKTable,
    encode_samples,
    expand_csr,
)
from practicum.server.worker import MAX_CELLS, Steps
from practicum.types import Sample, SampleRequest, SamplingParams

T = TypeVar("T")
Pausing = Generator[None, None, T]
"""Work that yields where other work may run."""

LANES = (2**4, 2**8, 2**12, 2**16)
"""The sizes up to which requests share a lane, in tokens to read and to write.

Larger requests have the last lane. A request waits for all earlier requests of its lane, which may
be thousands, so urgent requests need a separate lane.
"""

NO_TARGETS = TensorData(data=[], dtype="int64", shape=[0])

MAX_OVERLAYS = 8
"""The number of saved adapters that stay in memory after sampling."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class PublishedWeights:
    """Adapters in memory under a name; a snapshot never changes, live weights are replaced."""

    name: str
    weights: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Sampler:
    """The model of a sampling session: a base model, or adapters over it in memory or on disk."""

    id: str
    base: str
    spec: AdapterSpec | None = None
    published: PublishedWeights | None = None
    path: str | None = None

    @property
    def key(self) -> str:
        """Return the identity of the weights."""
        return self.path or (f"base {self.base}" if self.published is None else self.published.name)


@dataclass(frozen=True, slots=True)
class SampleItem:
    """One sampling request."""

    body: SampleBody
    tokens: tuple[int, ...]
    sampler: Sampler
    seed: int

    @property
    def needs_prompt_scores(self) -> bool:
        """Return True if the request needs any log-probability of its prompt."""
        body = self.body
        return bool(
            body.prompt_logprobs
            or body.topk_prompt_logprobs
            or body.target_prompt_logprobs
            or body.prompt_alt_tokens_k
        )

    @property
    def lane(self) -> int:
        """Return the lane of the request by its size.

        A request that samples to the end of the context counts as large.
        """
        most = self.body.sampling_params.max_tokens
        if most is None:
            return len(LANES)
        size = self.needs_prompt_scores * len(self.tokens) + self.body.num_samples * most
        return bisect_left(LANES, size)

    @property
    def cells(self) -> int:
        """Return the most entries that the tables of the answer can have."""
        most = self.body.sampling_params.max_tokens
        if most is None and self.body.topk_sample_logprobs:
            return MAX_CELLS
        return self.count_cells(most or 0)

    def count_cells(self, most: int, vocabulary: int = MAX_CANDIDATES) -> int:
        """Return the entries of all tables if each sample has `most` tokens."""
        body, shape = self.body, (self.body.target_prompt_logprobs or NO_TARGETS).shape or [0]
        table = min(body.topk_prompt_logprobs, vocabulary) + body.prompt_alt_tokens_k
        sampled = body.num_samples * most * min(body.topk_sample_logprobs, vocabulary)
        return len(self.tokens) * (table + max(shape[-1], 0)) + sampled

    @property
    def is_single_pass(self) -> bool:
        """Return True if the pass over the prompt answers the whole request."""
        return self.needs_prompt_scores and self.body.sampling_params.max_tokens == 1


@dataclass(slots=True)
class _SamplePlan:
    """The execution of one request, with its results so far."""

    item: SampleItem
    number: int
    params: SamplingParams
    seeds: tuple[int, ...]
    candidates: int = 0
    question: PromptQuestion | None = None
    targets: Tensor | None = None
    scores: PromptScores | None = None
    samples: Sequence[Sample] = ()
    topk: list[TopKTable] | None = None


class SamplingExecutor:
    """Execute batches of sampling requests; used only on the worker's thread."""

    def __init__(self, shelf: ModelCache, store: Store, most_tokens: int) -> None:
        self._shelf = shelf
        self._store = store
        self._most_tokens = most_tokens
        self._trees: dict[tuple[str, int, tuple[str, ...]], Reader] = {}
        self._overlays: OrderedDict[str, Mapping[str, Tensor]] = OrderedDict()
        shelf.on_evict.append(self._drop_trees)

    def execute(self, items: Sequence[SampleItem]) -> Steps:
        """Return one answer per request, in order, and yield where other work may run.

        All requests sample from the same weights. A request that cannot be executed fails without
        affecting the other requests.
        """
        start = time.monotonic()
        sampler = items[0].sampler
        loaded = self._shelf.get(sampler.base)
        model, overlay = self._resolve_weights(sampler, loaded)
        requests: list[_SamplePlan] = []
        answers: dict[int, ResponseBody] = {}
        for number, item in enumerate(items):
            try:
                requests.append(_plan(item, number, loaded, self._most_tokens))
            except (DataError, HttpRefusal) as error:
                answers[number] = encode_failure(error)
        answers |= yield from _answer(model, overlay, requests)
        _report(sampler.base, requests, time.monotonic() - start)
        return [answers[number] for number in range(len(items))]

    def _resolve_weights(self, sampler: Sampler, loaded: Hosted) -> tuple[Reader, Weights]:
        """Return the modules and the weights that replace theirs."""
        spec = sampler.spec
        if spec is None:
            return loaded.build_reader(), None
        # All adapters of one shape share a tree of modules; their weights are swapped in per batch.
        shape = spec.base, spec.rank, spec.parts
        if shape not in self._trees:
            self._trees[shape] = spec.build(loaded).build_reader()
        if sampler.published is not None:
            return self._trees[shape], sampler.published.weights
        return self._trees[shape], self._load_overlay(sampler, loaded)

    def _load_overlay(self, sampler: Sampler, loaded: Hosted) -> Mapping[str, Tensor]:
        assert sampler.path is not None
        if sampler.path not in self._overlays:
            tensors = self._store.load(sampler.path).read_tensors("student")
            self._overlays[sampler.path] = loaded.build_reader().bring(tensors)
            while len(self._overlays) > MAX_OVERLAYS:
                self._overlays.popitem(last=False)
        self._overlays.move_to_end(sampler.path)
        return self._overlays[sampler.path]

    def forget(self, path: str) -> None:
        """Drop the weights of a checkpoint that was overwritten."""
        self._overlays.pop(path, None)

    def _drop_trees(self, base: str) -> None:
        self._trees = {shape: tree for shape, tree in self._trees.items() if shape[0] != base}


def _answer(
    model: Reader, overlay: Weights, requests: Sequence[_SamplePlan]
) -> Pausing[dict[int, ResponseBody]]:
    """Return the answers by number; split a failed batch until only the request at fault fails."""
    try:
        yield from _score(model, overlay, requests)
        yield from _draw(model, overlay, requests)
        yield from _score_drawn(model, overlay, requests)
        return {request.number: _encode(request) for request in requests}
    except Exception as error:  # an error of one request must not fail another
        if len(requests) < 2:
            return {request.number: encode_error(error) for request in requests}
    answers: dict[int, ResponseBody] = {}
    for request in requests:
        request.scores, request.samples, request.topk = None, (), None
    half = len(requests) // 2
    for part in (requests[:half], requests[half:]):
        answers |= yield from _answer(model, overlay, part)
    return answers


def _encode(request: _SamplePlan) -> ResponseBody:
    body = encode_samples(_assemble(request), greedy=request.params.temperature == 0)
    return ResponseBody(body, PROTOBUF)


def _report(name: str, requests: Sequence[_SamplePlan], seconds: float) -> None:
    """Log the numbers of scored and sampled tokens."""
    scored = sum(request.question.rows for request in requests if request.question is not None)
    decoded = [request for request in requests if not request.item.is_single_pass]
    sampled = sum(len(sample.tokens) for request in decoded for sample in request.samples)
    parts = [f"scored {scored:,} tokens"] * bool(scored)
    parts += [f"wrote {sampled:,} tokens"] * bool(sampled)
    log.info(
        f"{name}: {len(requests)} requests, {', '.join(parts) or 'nothing to do'}, {seconds:.2f} s"
    )


def _score(model: Reader, overlay: Weights, requests: Sequence[_SamplePlan]) -> Pausing[None]:
    """Score prompts; a request of a single pass also gets its samples."""
    scored = [request for request in requests if request.question is not None]
    questions = [request.question for request in scored if request.question is not None]
    answers = yield from model.score(questions, overlay)
    for request, scores in zip(scored, answers, strict=True):
        request.scores, request.samples = scores, scores.following


def _draw(model: Reader, overlay: Weights, requests: Sequence[_SamplePlan]) -> Pausing[None]:
    """Sample the missing completions; requests with the same settings are decoded together."""
    # Equal settings can share a decode batch; each completion keeps its own random stream.
    alike: dict[str, list[_SamplePlan]] = {}
    for request in requests:
        if not request.samples:
            alike.setdefault(_build_batch_key(request.item), []).append(request)
    for group in alike.values():
        prompts = [
            SampleRequest(request.item.tokens, seed) for request in group for seed in request.seeds
        ]
        samples = iter((yield from model.draw(prompts, group[0].params, overlay)))
        for request in group:
            request.samples = [next(samples) for _ in request.seeds]


def _score_drawn(model: Reader, overlay: Weights, requests: Sequence[_SamplePlan]) -> Pausing[None]:
    """Find the top k tokens at each sampled token, in one pass over prompt and completion."""
    scored: list[_SamplePlan] = []
    questions: list[PromptQuestion] = []
    for request in requests:
        prompt, k = request.item.tokens, request.candidates
        for sample in request.samples if k else ():
            scored.append(request)
            tokens = (*prompt, *sample.tokens.tolist())
            questions.append(PromptQuestion(tokens, len(prompt), k))
    answers = yield from model.score(questions, overlay)
    for request, scores in zip(scored, answers, strict=True):
        request.topk = [*(request.topk or []), TopKTable(scores.topk_ids, scores.topk_logprobs)]


def encode_failure(error: PracticumError | HttpRefusal) -> ResponseBody:
    """Return the answer to a request that must change before it can be executed."""
    return _encode_refusal(" ".join(str(error).split()), "user")


def encode_error(error: Exception) -> ResponseBody:
    """Return the answer to a request that raised an error, and log it."""
    if isinstance(error, PracticumError | HttpRefusal):
        log.info(f"refused: {error}")
        return encode_failure(error)
    log.info(f"failed: {type(error).__name__}: {error}")
    # Only a bug comes here; the operator can report it.
    traceback.print_exception(error)
    text = f"the server failed ({type(error).__name__}); its console says more"
    return _encode_refusal(text, "server")


def _encode_refusal(text: str, category: str) -> ResponseBody:
    return replace(encode_json({"error": text, "category": category}), is_error=True)


def encode_json(reply: Mapping[str, object]) -> ResponseBody:
    """Return a finished answer in JSON."""
    return ResponseBody(json.dumps(reply, allow_nan=False).encode(), "application/json")


def _plan(requested: SampleItem, number: int, loaded: Hosted, most_tokens: int) -> _SamplePlan:
    """Return the plan of a request; raise DataError if the model cannot execute it."""
    body, count, vocabulary = requested.body, len(requested.tokens), loaded.vocab_size
    context = loaded.context_length
    if not 1 <= count <= context:
        raise DataError(f"the prompt has {count} tokens, and the model reads 1 to {context}")
    check_token_ids(requested.tokens, vocabulary, "prompt")
    most = body.sampling_params.max_tokens or max(context - count, 1)
    # The model does not read the last token that it draws.
    if count + most - 1 > context:
        raise DataError(
            f"{count} tokens of prompt and max_tokens {most} do not fit in the context of {context}"
        )
    check_tokens(body.num_samples, most, most_tokens)
    params = _build_params(requested, loaded, most)
    # The first sample takes the request's own seed, as without a service: both runs are the same.
    seeds = (
        requested.seed,
        *(seed_of(requested.seed, number) for number in range(1, body.num_samples)),
    )
    last = body.prompt_logprobs_last_n
    if last is not None and not (body.prompt_logprobs and last <= count - 1):
        raise DataError(
            f"prompt_logprobs_last_n is {last}: it needs prompt_logprobs and at most the {count - 1} tokens after the first"
        )
    check_cells(requested, most, vocabulary)
    candidates = min(body.topk_sample_logprobs, vocabulary)
    if not requested.needs_prompt_scores:
        return _SamplePlan(requested, number, params, seeds, candidates=candidates)
    targets = None
    if body.target_prompt_logprobs is not None:
        targets = _read_targets(body.target_prompt_logprobs, count, vocabulary)
    # Prompt scores start at the first token that any of the tables needs.
    starts = [count]
    if body.prompt_logprobs or body.topk_prompt_logprobs:
        starts.append(1 if last is None else count - last)
    if body.prompt_alt_tokens_k:
        starts.append(1)
    if targets is not None:
        starts += [int(row) + 1 for row in (targets >= 0).any(dim=1).nonzero()[:1, 0]]
    first = min(starts)
    question = PromptQuestion(
        tokens=requested.tokens,
        first=first,
        topk=min(body.topk_prompt_logprobs, vocabulary),
        targets=None if targets is None else targets[first - 1 :],
        draws=body.prompt_alt_tokens_k,
        temperature=body.sampling_params.temperature,
        seed=requested.seed,
        following=seeds if most == 1 else (),
        params=params,
    )
    return _SamplePlan(requested, number, params, seeds, candidates, question, targets)


def check_cells(item: SampleItem, most: int, vocabulary: int) -> None:
    """Raise DataError if the tables of an answer may have more entries than the limit."""
    cells = item.count_cells(most, vocabulary)
    if cells > MAX_CELLS:
        raise DataError(
            f"the answer has tables of {cells} cells (candidates times samples times tokens), and "
            f"{MAX_CELLS} is the most; ask for fewer candidates, or for fewer samples in one request"
        )


def check_tokens(samples: int, most: int, limit: int) -> None:
    """Raise DataError if a request may sample more tokens than the limit."""
    if samples * most > limit:
        fewer = f"at most {limit // most} samples, or for the rest in other requests"
        if most > limit:
            fewer = f"at most {limit} tokens"
        raise DataError(
            f"num_samples {samples} times max_tokens {most} is more than the {limit} tokens that "
            f"a request may draw; ask for {fewer}"
        )


def _build_batch_key(item: SampleItem) -> str:
    """Return what requests share to be decoded together: all settings but the seed, and the end."""
    settings = item.body.sampling_params
    end = settings.max_tokens or -len(item.tokens)
    return f"{end} {settings.model_copy(update={'seed': None}).model_dump_json()}"


def _build_params(item: SampleItem, loaded: Hosted, most: int) -> SamplingParams:
    settings = item.body.sampling_params
    params = SamplingParams(
        most, settings.temperature, settings.top_p, max(settings.top_k, 0), loaded.renderer.stop_ids
    )
    if settings.stop is None:
        return params
    stops = [settings.stop] if isinstance(settings.stop, str) else settings.stop
    texts = tuple(stop for stop in stops if isinstance(stop, str))
    if "" in texts:
        raise DataError("stop holds an empty text, which every answer begins with; leave it out")
    ids = frozenset(stop for stop in stops if isinstance(stop, int))
    return replace(params, stop_ids=ids, stop_texts=texts)


def _read_targets(body: TensorData, count: int, vocabulary: int) -> Tensor:
    """Return the token ids to score, [N - 1, K], -1 in cells without one."""
    shape = body.shape or []
    if len(shape) != 2 or shape[0] != count - 1 or shape[1] < 1:
        raise DataError(
            f"target_prompt_logprobs has the shape {shape}, not [{count - 1}, K]: one row for each token after the first"
        )
    values = np.asarray(body.data, dtype=np.int64)
    if body.sparse_crow_indices is not None:
        crow = np.asarray(body.sparse_crow_indices, dtype=np.int64)
        columns = np.asarray(body.sparse_col_indices or [], dtype=np.int64)
        targets = expand_csr(values, crow, columns, shape, -1, "target_prompt_logprobs")
    elif values.size == shape[0] * shape[1]:
        targets = torch.from_numpy(values).view(tuple(shape))
    else:
        raise DataError(
            f"target_prompt_logprobs has {values.size} values, which do not fit the shape {shape}"
        )
    if targets.numel() and not -1 <= int(targets.min()) <= int(targets.max()) < vocabulary:
        raise DataError(
            f"target_prompt_logprobs names tokens that are not among the {vocabulary} of the vocabulary"
        )
    return targets


def _assemble(request: _SamplePlan) -> SampleAnswer:
    """Return the answer with every table at full length.

    Cells are empty if they were not requested and at the first token.
    """
    body, count, scores = request.item.body, len(request.item.tokens), request.scores
    if scores is None:
        return SampleAnswer(request.samples, request.topk)
    assert request.question is not None
    skipped = count - (body.prompt_logprobs_last_n or count - 1)
    before = request.question.first
    logprobs = torch.full((count,), torch.nan)
    logprobs[before:] = scores.logprobs
    logprobs[:skipped] = torch.nan
    table = None
    if body.topk_prompt_logprobs:
        ids = torch.full((count, scores.topk_ids.shape[1]), -1)
        values = torch.zeros(ids.shape)
        ids[before:], values[before:] = scores.topk_ids, scores.topk_logprobs
        ids[:skipped] = -1
        table = TopKTable(ids, values)
    targets, sparse = _gather_targets(request, request.question, scores)
    return SampleAnswer(
        samples=request.samples,
        sample_topk=request.topk,
        prompt_logprobs=logprobs if body.prompt_logprobs else None,
        prompt_topk=table,
        targets=targets,
        sparse=sparse,
        drawn=TopKTable(scores.drawn, scores.drawn_logprobs) if body.prompt_alt_tokens_k else None,
    )


def _gather_targets(
    request: _SamplePlan, question: PromptQuestion, scores: PromptScores
) -> tuple[Tensor | None, SparseLayout | None]:
    """Return the log-probabilities of the target tokens in the layout of the request."""
    body = request.item.body.target_prompt_logprobs
    if body is None or request.targets is None or scores.target_logprobs is None:
        return None, None
    dense = torch.zeros(request.targets.shape)
    dense[question.first - 1 :] = scores.target_logprobs
    crow, columns = body.sparse_crow_indices, body.sparse_col_indices
    if crow is None or columns is None:
        return dense, None
    counts = torch.tensor(crow).diff()
    rows = torch.arange(len(counts)).repeat_interleave(counts)
    values = dense[rows, torch.tensor(columns, dtype=torch.long)]
    return values, SparseLayout(crow, columns, list(dense.shape))
