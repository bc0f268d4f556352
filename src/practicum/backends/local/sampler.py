"""Batched sampling and scoring with a key-value cache.

Every completion draws from its own random stream, so what is sampled does not depend on what shares its batch beyond
the rounding of the matrix products.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache

from practicum import functional as F
from practicum.backends.local.language_model import LanguageModel
from practicum.errors import NumericError
from practicum.functional.chunked import chunks
from practicum.objective import Signal
from practicum.ports import Capabilities, LockstepClient, MixedRequest, Reading, ScoreRequest
from practicum.types import Head, Sample, SampleRequest, SamplingParams, TeacherSignal

SHORTEST_SHARED_PREFIX = 16
"""Below this many common tokens a shared prefix is not worth a forward pass of its own."""


@dataclass(slots=True)
class _Prefilled:
    """A batch of prompts that the body has read: its cache, its mask, and each prompt's last hidden state."""

    cache: DynamicCache
    mask: Bool[Tensor, "B M"]
    last_hidden: Float[Tensor, "B D"]


@dataclass(frozen=True, slots=True)
class LocalSampler:
    """Samples and scores with a local model, under the live weights or an `overlay` of some of them."""

    language_model: LanguageModel
    overlay: Mapping[str, Tensor] | None = None
    batch_size: int = 64
    chunk_tokens: int = 128

    @property
    def capabilities(self) -> Capabilities:
        """Everything: the whole distribution is at hand."""
        return Capabilities(signals=frozenset({"sampled", "topk", "full"}))

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """One completion a request, in order."""
        samples: list[Sample] = []
        for part in chunks(len(requests), self.batch_size):
            reading = self.read([request.prompt_tokens for request in requests[part]])
            samples += _Decoding(reading, [request.seed for request in requests[part]], params).run()
        return samples

    def sample_mixed(
        self, requests: Sequence[MixedRequest], teacher: LockstepClient, share: float, params: SamplingParams
    ) -> list[Sample]:
        """One completion a request, drawn from `share * T + (1 - share) * S` at each token (MiniLLM 2306.08543).

        T and S are what teacher and student would each sample from, after temperature, top-k and top-p.
        """
        samples: list[Sample] = []
        for part in chunks(len(requests), self.batch_size):
            own = self.read([request.prompt_tokens for request in requests[part]])
            theirs = teacher.read([request.teacher_tokens for request in requests[part]])
            samples += _Decoding(own, [request.seed for request in requests[part]], params, theirs, share).run()
        return samples

    def read(self, prompts: Sequence[tuple[int, ...]]) -> "LocalReading":
        """Read the prompts, equal ones once."""
        return LocalReading(self, prompts)

    @torch.no_grad()
    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """The hidden states that predict each request's tokens with the head that reads them, or the tokens' log-probs."""
        self.language_model.model.eval()
        signals: list[TeacherSignal] = []
        with self.language_model.weights(self.overlay or {}):
            head = self.head()
            for part in chunks(len(requests), self.batch_size):
                for request, hidden in zip(requests[part], self._hidden(requests[part]), strict=True):
                    if signal.type == "sampled":
                        signals.append(TeacherSignal(logprobs=self._logprobs(head, hidden, request.tokens)))
                    else:
                        signals.append(TeacherSignal(hidden=hidden, head=head))
        return signals

    def head(self) -> Head:
        """The head with its weights pinned to the overlay's storage, so that it outlives the swap."""
        head = self.language_model.head()
        bias = None if head.bias is None else head.bias.data
        return Head(head.weight.data, head.vocab_size, bias, head.scale, head.softcap)

    def _hidden(self, requests: Sequence[ScoreRequest]) -> Iterator[Float[Tensor, "T D"]]:
        sequences = [(*request.prompt_tokens, *request.tokens) for request in requests]
        longest_prefix = min(len(request.prompt_tokens) for request in requests) - 1
        shared = _shared_prefix(self.language_model, sequences, longest_prefix)
        rests = [sequence[shared:] for sequence in sequences]
        ids, mask = _padded(rests, side="right", device=self.language_model.device)
        cache = None
        if shared:
            cache = _read_prefix(self.language_model, sequences[0][:shared], len(requests))
            mask = torch.cat([mask.new_ones(len(requests), shared), mask], dim=1)
        hidden = self.language_model.body(ids, mask, cache)
        for row, request in enumerate(requests):
            first = len(request.prompt_tokens) - shared - 1
            yield hidden[row, first : first + len(request.tokens)].clone()

    def _logprobs(self, head: Head, hidden: Float[Tensor, "T D"], tokens: Sequence[int]) -> Float[Tensor, " T"]:
        ids = torch.tensor(tokens, dtype=torch.long, device=hidden.device)
        parts = [
            F.gather_logprobs(head.logprobs(hidden[part]), ids[part]) for part in chunks(len(ids), self.chunk_tokens)
        ]
        return torch.cat(parts).cpu() if parts else torch.zeros(0)


class LocalReading:
    """Texts that a local model reads token by token with a key-value cache; see `practicum.ports.Reading`."""

    @torch.no_grad()
    def __init__(self, sampler: LocalSampler, prompts: Sequence[tuple[int, ...]]) -> None:
        self._language_model = sampler.language_model
        self._overlay = sampler.overlay or {}
        self._language_model.model.eval()
        different = list(dict.fromkeys(prompts))
        with self._language_model.weights(self._overlay):
            self._head = sampler.head()
            state = _prefill(self._language_model, different)
        rows = torch.tensor([different.index(prompt) for prompt in prompts], device=self._language_model.device)
        self._state = _select(state, rows)

    @torch.no_grad()
    def logprobs(self) -> Float[Tensor, "B V"]:
        """The model's own log-probabilities of each row's next token."""
        return self._head.logprobs(self._state.last_hidden)

    @torch.no_grad()
    def advance(self, tokens: Int[Tensor, " B"], keep: Sequence[int]) -> None:
        """Let the body read each row's next token, in the rows that go on."""
        tokens = tokens.to(self._language_model.device)
        if len(keep) < len(tokens):
            self._state = _select(self._state, torch.tensor(keep, device=tokens.device))
        mask = torch.cat([self._state.mask, self._state.mask.new_ones(len(keep), 1)], dim=1)
        with self._language_model.weights(self._overlay):
            hidden = self._language_model.body(tokens[keep][:, None], mask, self._state.cache)
        self._state = _Prefilled(self._state.cache, mask, hidden[:, -1])


class _Decoding:
    """One batch being decoded, with a share of a teacher's distribution where there is one.

    Rows leave the batch as soon as they are finished.
    """

    def __init__(
        self,
        policy: Reading,
        seeds: Sequence[int],
        params: SamplingParams,
        teacher: Reading | None = None,
        share: float = 0.0,
    ) -> None:
        self.policy = policy
        self.teacher = teacher
        self.share = share
        self.params = params
        self.uniforms = torch.stack([_uniforms(seed, params.max_new_tokens) for seed in seeds])
        self.tokens: list[list[int]] = [[] for _ in seeds]
        self.sampling_logprobs: list[list[float]] = [[] for _ in seeds]
        self.policy_logprobs: list[list[float]] = [[] for _ in seeds]
        self.alive = list(range(len(seeds)))

    def run(self) -> list[Sample]:
        for position in range(self.params.max_new_tokens):
            drawn = self._draw(position)
            keep = [row for row, token in enumerate(drawn) if token not in self.params.stop_ids]
            self.alive = [self.alive[row] for row in keep]
            if not self.alive or position + 1 == self.params.max_new_tokens:
                break
            self.policy.advance(torch.tensor(drawn), keep)
            if self.teacher is not None:
                self.teacher.advance(torch.tensor(drawn), keep)
        return [self._sample(row) for row in range(len(self.tokens))]

    def _draw(self, position: int) -> list[int]:
        """Draw one token for every row that is alive, and write down its log-probabilities."""
        policy = self.policy.logprobs()
        sampling = _sampling_logprobs(policy, self.params)
        if self.teacher is not None:
            theirs = _sampling_logprobs(self.teacher.logprobs().to(policy.device), self.params)
            sampling = F.mixture([(self.share, theirs), (1.0 - self.share, sampling)])
        drawn = _inverse_cdf(sampling, self.uniforms[self.alive, position].to(sampling.device))
        sampled = F.gather_logprobs(sampling, drawn).tolist()
        natural = F.gather_logprobs(policy, drawn).tolist()
        tokens = drawn.tolist()
        if any(math.isnan(value) for value in (*natural, *sampled)):
            raise NumericError(
                "the model's log-probabilities are not numbers, so its weights diverged or are damaged; lower "
                "optimizer.learning_rate and resume from an earlier checkpoint"
            )
        for row, token, sampling_logprob, policy_logprob in zip(self.alive, tokens, sampled, natural, strict=True):
            self.tokens[row].append(token)
            self.sampling_logprobs[row].append(sampling_logprob)
            self.policy_logprobs[row].append(policy_logprob)
        return tokens

    def _sample(self, row: int) -> Sample:
        tokens = self.tokens[row]
        return Sample(
            tokens=torch.tensor(tokens, dtype=torch.long),
            sampling_logprobs=torch.tensor(self.sampling_logprobs[row], dtype=torch.float32),
            policy_logprobs=torch.tensor(self.policy_logprobs[row], dtype=torch.float32),
            stop_reason="stop" if tokens and tokens[-1] in self.params.stop_ids else "length",
        )


def _uniforms(seed: int, count: int) -> Float[Tensor, " T"]:
    """The random stream of one completion; its first numbers do not depend on how many are asked for."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _sampling_logprobs(policy: Float[Tensor, "B V"], params: SamplingParams) -> Float[Tensor, "B V"]:
    """The distribution that is sampled from: temperature, then top-k, then top-p, renormalised."""
    if params.temperature == 0:
        greedy = torch.full_like(policy, -torch.inf)
        return greedy.scatter(-1, policy.argmax(dim=-1, keepdim=True), 0.0)
    logprobs = F.temper(policy, params.temperature) if params.temperature != 1.0 else policy
    if params.top_k:
        smallest = logprobs.topk(min(params.top_k, logprobs.shape[-1]), dim=-1).values[..., -1:]
        logprobs = logprobs.masked_fill(logprobs < smallest, -torch.inf)
    if params.top_p < 1.0:
        ordered, order = torch.log_softmax(logprobs, dim=-1).sort(dim=-1, descending=True)
        before = ordered.exp().cumsum(dim=-1) - ordered.exp()
        outside = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= params.top_p)
        logprobs = logprobs.masked_fill(outside, -torch.inf)
    return torch.log_softmax(logprobs, dim=-1) if params.top_k or params.top_p < 1.0 else logprobs


def _inverse_cdf(logprobs: Float[Tensor, "B V"], uniforms: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
    """The token at which the cumulative probability passes each uniform number; never one of probability 0."""
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    target = uniforms.double()[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_max(logprobs.shape[-1] - 1)


def _prefill(language_model: LanguageModel, prompts: Sequence[tuple[int, ...]]) -> _Prefilled:
    """Read the prompts, a long common beginning only once."""
    shared = _shared_prefix(language_model, prompts, min(map(len, prompts)) - 1)
    ids, mask = _padded([prompt[shared:] for prompt in prompts], side="left", device=language_model.device)
    cache = language_model.new_cache()
    if shared:
        cache = _read_prefix(language_model, prompts[0][:shared], len(prompts))
        mask = torch.cat([mask.new_ones(len(prompts), shared), mask], dim=1)
    hidden = language_model.body(ids, mask, cache)
    return _Prefilled(cache, mask, hidden[:, -1])


def _read_prefix(language_model: LanguageModel, prefix: Sequence[int], rows: int) -> DynamicCache:
    cache = language_model.new_cache()
    ids, mask = _padded([prefix], side="left", device=language_model.device)
    language_model.body(ids, mask, cache)
    cache.batch_repeat_interleave(rows)
    return cache


def _shared_prefix(language_model: LanguageModel, sequences: Sequence[Sequence[int]], longest: int) -> int:
    """How many first tokens all sequences share, 0 where sharing does not pay or would not be exact."""
    if len(sequences) < 2 or longest < SHORTEST_SHARED_PREFIX or language_model.sliding:
        return 0
    shared = 0
    while shared < longest and len({sequence[shared] for sequence in sequences}) == 1:
        shared += 1
    return shared if shared >= SHORTEST_SHARED_PREFIX else 0


def _select(state: _Prefilled, rows: Int[Tensor, " b"]) -> _Prefilled:
    state.cache.batch_select_indices(rows)
    return _Prefilled(state.cache, state.mask[rows], state.last_hidden[rows])


def _padded(
    sequences: Sequence[Sequence[int]], *, side: str, device: torch.device
) -> tuple[Int[Tensor, "B L"], Bool[Tensor, "B L"]]:
    """Token ids and the mask of the real ones; the padding id is never looked at."""
    width = max(map(len, sequences))
    ids = torch.zeros(len(sequences), width, dtype=torch.long)
    mask = torch.zeros(len(sequences), width, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        part = slice(width - len(sequence), width) if side == "left" else slice(0, len(sequence))
        ids[row, part] = torch.tensor(sequence, dtype=torch.long)
        mask[row, part] = True
    return ids.to(device), mask.to(device)
