"""Sampling and scoring with a local model.

Every completion draws from its own random stream, so what is sampled does not depend on what shares its batch beyond
the rounding of the matrix products.
"""

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from practicum import functional as F
from practicum.backends.local.drawing import (
    draw,
    draw_exponentials,
    random_stream,
    sample_mixed_tokens,
)
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.packing import hidden_states
from practicum.backends.local.reading import open_decode_batch
from practicum.core import abandon
from practicum.costs.segments import how_many_fit
from practicum.errors import NumericError
from practicum.functional.chunked import chunks
from practicum.functional.head import Head
from practicum.objective import Signal
from practicum.ports import Capabilities, DecodeBatch, LockstepClient, MixedRequest
from practicum.text import Check, stop_check
from practicum.types import Sample, SampleRequest, SamplingParams, ScoreRequest, TeacherSignal

SCORED_TOKENS = 1024
"""So many tokens are scored in one pass; more are no faster each (`python -m benchmarks sizes`), and hold more memory."""

Steps = Generator[None, None, list[Sample]]
"""Completions being drawn: it pauses where other work can be done in between, and returns them."""


@dataclass(frozen=True, slots=True)
class LocalSampler:
    """Samples and scores with a local model, under the live weights or an `overlay` of some of them.

    `batch_size` is how many completions are decoded at once, `chunk_tokens` how many tokens' [., V] log-probabilities are
    held at once when scoring.
    """

    language_model: LanguageModel
    overlay: Mapping[str, Tensor] = field(default_factory=dict)
    batch_size: int = 64
    chunk_tokens: int = 128

    @property
    def capabilities(self) -> Capabilities:
        """Everything: the whole distribution is at hand."""
        return Capabilities(signals=frozenset({"sampled", "topk", "full"}), follows_student=False)

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """One completion a request, in order."""
        return _run_through(self.steps(requests, params))

    def steps(self, requests: Sequence[SampleRequest], params: SamplingParams) -> Steps:
        """Draw what `sample` draws, with a pause after each token of the completions that are decoded together."""
        if not requests:
            return []
        stops = stop_check(params, self.language_model.tokenizer)
        prompts, seeds = (
            [request.prompt_tokens for request in requests],
            [request.seed for request in requests],
        )
        policy = self.read(prompts, self.batch_size, params.max_new_tokens)
        return (yield from _DecodeLoop(policy, seeds, params, stops).steps(self.batch_size))

    def sample_mixed(
        self,
        requests: Sequence[MixedRequest],
        teacher: LockstepClient,
        share: float,
        params: SamplingParams,
    ) -> list[Sample]:
        """One completion a request, drawn from `share * T + (1 - share) * S` at each token (MiniLLM 2306.08543).

        T and S are what teacher and student would each sample from, after temperature, top-k and top-p.
        """
        if not requests:
            return []
        stops = stop_check(params, self.language_model.tokenizer)
        rows, length = self.batch_size, params.max_new_tokens
        own = self.read([request.prompt_tokens for request in requests], rows, length)
        teacher_batch = teacher.read(
            [request.teacher_prompt_tokens for request in requests], rows, length
        )
        seeds = [request.seed for request in requests]
        return _run_through(
            _DecodeLoop(own, seeds, params, stops, teacher_batch, share).steps(rows)
        )

    def read(self, prompts: Sequence[tuple[int, ...]], rows: int, new_tokens: int) -> DecodeBatch:
        """Read the prompts, at most `rows` at a time and equal ones once, each with at most `new_tokens` after it."""
        return open_decode_batch(self.language_model, self.overlay, prompts, rows, new_tokens)

    @torch.no_grad()
    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """The hidden states that predict each request's tokens with the head that reads them, or the tokens' log-probs."""
        self.language_model.model.eval()
        signals: list[TeacherSignal] = []
        with self.language_model.weights(self.overlay):
            head = (
                self.language_model.head().pinned()
            )  # to the overlay's storage, so that it outlives the block
            for part in self._passes(requests):
                abandon.check()
                whole = hidden_states(self.language_model, part)
                each = whole.split([len(request.tokens) for request in part])
                for request, hidden in zip(part, each, strict=True):
                    if signal.sampled:
                        signals.append(
                            TeacherSignal(logprobs=self._logprobs(head, hidden, request.tokens))
                        )
                    else:
                        signals.append(TeacherSignal(hidden=hidden, head=head))
        return signals

    def _passes(self, requests: Sequence[ScoreRequest]) -> Iterator[Sequence[ScoreRequest]]:
        """The requests in order, as many at a time as `SCORED_TOKENS` allows."""
        while requests:
            count = how_many_fit(requests, SCORED_TOKENS, self.language_model.packs_up_to)
            yield requests[:count]
            requests = requests[count:]

    def _logprobs(
        self, head: Head, hidden: Float[Tensor, "T D"], tokens: Sequence[int]
    ) -> Float[Tensor, " T"]:
        ids = torch.tensor(tokens, dtype=torch.long, device=hidden.device)
        parts = [
            F.gather_logprobs(head.logprobs(hidden[part]), ids[part])
            for part in chunks(len(ids), self.chunk_tokens)
        ]
        return torch.cat(parts).cpu() if parts else torch.zeros(0)


class _DecodeLoop:
    """Completions being drawn until `stops` says so of their tokens, with a share of a teacher's distribution where there is one.

    A completion that ends makes room for the next one, where the readings can take it in.
    """

    def __init__(
        self,
        policy: DecodeBatch,
        seeds: Sequence[int],
        params: SamplingParams,
        stops: Check,
        teacher: DecodeBatch | None = None,
        share: float = 0.0,
    ) -> None:
        self.policy = policy
        self.teacher = teacher
        self.share = share
        self.params = params
        self.stops = stops
        self.readings = [policy] if teacher is None else [policy, teacher]
        self.streams = [random_stream(seed) for seed in seeds]
        self.tokens: list[list[int]] = [[] for _ in seeds]
        self.sampling_logprobs: list[list[float]] = [[] for _ in seeds]
        self.policy_logprobs: list[list[float]] = [[] for _ in seeds]
        self.waiting = iter(range(len(seeds)))
        self.stopped: set[int] = set()

    def steps(self, rows: int) -> Steps:
        active: list[int] = self._admit(rows) if self.params.max_new_tokens else []
        while active:
            abandon.check()
            drawn = self._draw(active)
            keep = _compact_rows(self._unfinished(active))
            for reading in self.readings:
                reading.advance(drawn, keep)
            active = [active[row] for row in keep]
            if not active or all(reading.refills for reading in self.readings):
                active += self._admit(rows - len(active))
            yield
        return [self._sample(text) for text in range(len(self.tokens))]

    def _admit(self, most: int) -> list[int]:
        """The texts that take the free rows."""
        counts = {reading.admit(most) for reading in self.readings}
        assert len(counts) == 1, "readings in lockstep admit the same texts"
        return [next(self.waiting) for _ in range(counts.pop())]

    def _unfinished(self, alive: Sequence[int]) -> list[int]:
        """Return the rows whose texts go on; those at a stop are remembered."""
        stops = self.stops([self.tokens[text] for text in alive])
        self.stopped |= {text for text, stopped in zip(alive, stops, strict=True) if stopped}
        most = self.params.max_new_tokens
        return [
            row
            for row, text in enumerate(alive)
            if not (stops[row] or len(self.tokens[text]) == most)
        ]

    def _draw(self, alive: Sequence[int]) -> Tensor:
        """Draw one token for every row, and write down its log-probabilities."""
        logits = self.policy.logits()
        noise = draw_exponentials([self.streams[text] for text in alive], logits.shape[-1]).to(
            logits.device
        )
        if self.teacher is None:
            drawn, sampled, natural = draw(logits, self.params, noise)
        else:
            teacher_batch = self.teacher.logits().to(logits.device)
            drawn, sampled, natural = sample_mixed_tokens(
                logits, teacher_batch, self.share, self.params, noise
            )
        found = zip(alive, drawn.tolist(), sampled.tolist(), natural.tolist(), strict=True)
        for text, token, sampling_logprob, policy_logprob in found:
            if math.isnan(sampling_logprob) or math.isnan(policy_logprob):
                raise NumericError(
                    "the model's log-probabilities are not numbers, so its weights diverged or are damaged; lower "
                    "optimizer.learning_rate and resume from an earlier checkpoint"
                )
            self.tokens[text].append(token)
            self.sampling_logprobs[text].append(sampling_logprob)
            self.policy_logprobs[text].append(policy_logprob)
        return drawn

    def _sample(self, text: int) -> Sample:
        tokens = self.tokens[text]
        return Sample(
            tokens=torch.tensor(tokens, dtype=torch.long),
            sampling_logprobs=torch.tensor(self.sampling_logprobs[text], dtype=torch.float32),
            policy_logprobs=torch.tensor(self.policy_logprobs[text], dtype=torch.float32),
            stop_reason="stop" if text in self.stopped else "length",
        )


def _run_through(steps: Steps) -> list[Sample]:
    """Return what is drawn when no pause is made use of."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def _compact_rows(rows: Sequence[int]) -> list[int]:
    """The rows that go on, each where it was if it can, the last ones in the places of those that ended."""
    kept = set(rows)
    spare = [row for row in rows if row >= len(rows)]
    return [row if row in kept else spare.pop() for row in range(len(rows))]
