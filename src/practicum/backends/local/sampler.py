"""Sample from and score with a local model.

Every completion has its own random stream, so the other completions in a batch affect a sampled
token only through the rounding of matrix products.
"""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import torch
from jaxtyping import Float
from torch import Tensor

from practicum import functional as F
from practicum.backends.local.cached_texts import CachedTexts
from practicum.backends.local.decode_batch import open_decode_batch
from practicum.backends.local.decode_step import Steps
from practicum.backends.local.device_limits import find_limits
from practicum.backends.local.drawing import (
    TokenReading,
    build_divergence_error,
    draw_exponentials,
    open_random_stream,
    open_request_stream,
    sample_tokens,
)
from practicum.backends.local.host_states import DEVICE_BYTES, HostStore
from practicum.backends.local.language_model import Decoding, LanguageModel
from practicum.backends.local.native.library import NativeLibrary, load_library
from practicum.backends.local.packing import compute_hidden_states, iterate_hidden_states
from practicum.backends.local.prefixes import PrefixStore
from practicum.backends.local.prepared import MIN_DECODE_STEPS, LayoutStore, PrepackedModel
from practicum.backends.local.static import choose_settings, open_static_loop
from practicum.backends.local.text_states import Recording, StateRecorder, find_hidden
from practicum.core import abandon
from practicum.core.waits import show_wait
from practicum.functional.chunked import chunks
from practicum.functional.head import Head
from practicum.objective import EVERY_SIGNAL, Signal
from practicum.pictures import fill_pictures
from practicum.ports import Capabilities, DecodeBatch, MixedRequest, SamplingClient, TokenRule
from practicum.text import Check, stop_check
from practicum.types import (
    AUTHORS,
    Sample,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    TeacherSignal,
    TextStates,
)


@dataclass(frozen=True, slots=True)
class LocalSampler(SamplingClient):
    """Sample and score with a local model that uses its live weights or an `overlay`.

    `batch_size` completions decode at once. Scoring holds the [., V] log-probabilities of
    `chunk_tokens` tokens at once, and leaves at most `device_bytes` of a call's hidden states on a
    device that is not the CPU. If the weights never change, scoring keeps the states of shared text
    prefixes in `prefixes`, and the prepacked weights in `layout`. With `learns`, samples keep the
    states that an update of the same step can use. With `kept`, texts that later calls continue are
    read once.
    """

    language_model: LanguageModel
    overlay: Mapping[str, Tensor] = field(default_factory=dict)
    batch_size: int = 64
    chunk_tokens: int = 128
    device_bytes: int = DEVICE_BYTES
    prefixes: PrefixStore | None = None
    layout: LayoutStore | None = None
    learns: bool = False
    kept: CachedTexts | None = None

    def remember_texts(self) -> Self:
        """Return the same sampler with room for texts that will be continued."""
        # A model that cannot pack, for example because of a recurrent state, reads its texts again.
        can_keep = self.language_model.max_packed_tokens > 0
        return replace(self, kept=CachedTexts()) if can_keep else self

    def freeze(self) -> Self:
        """Return the same sampler for weights that never change."""
        return replace(self, prefixes=PrefixStore(), layout=LayoutStore())

    @property
    def capabilities(self) -> Capabilities:
        """Every signal: the full distribution is known."""
        return EVERY_SIGNAL

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """Sample one completion per request, in order."""
        if not requests:
            return []
        return run_to_end(self._open_loop(requests, params), len(requests), self.batch_size)

    def run_steps(self, requests: Sequence[SampleRequest], params: SamplingParams) -> Steps:
        """Sample as `sample` does, but yield every few tokens and after each prefill."""
        if not requests:
            return []
        return (yield from self._open_loop(requests, params).run(self.batch_size))

    def _open_loop(self, requests: Sequence[SampleRequest], params: SamplingParams) -> "_Loop":
        model, check = self.language_model, stop_check(params, self.language_model.tokenizer)
        params = self._ban_pictures(params)
        settings = choose_settings(model)
        # A few tokens do not repay the cost of packing the weights and capturing a step. The static
        # program starts streams at a completion's first token, so a continued completion is sampled
        # step by step.
        begins = all(request.continues is None for request in requests)
        if settings is not None and begins and params.max_new_tokens >= MIN_DECODE_STEPS:
            settings = replace(settings, kept=self.kept)
            static = open_static_loop(
                model, self.overlay, requests, params, self.batch_size, check, settings
            )
            if static is not None:
                return static
        prompts = [request.prompt_tokens for request in requests]
        recorder = self._open_recorder(requests, params)
        return _DecodeLoop(
            open_decode_batch(
                model,
                self.overlay,
                prompts,
                self.batch_size,
                params.max_new_tokens,
                self.kept,
                recorder,
            ),
            [open_request_stream(request, model.vocab_size) for request in requests],
            params,
            check,
            library=self.open_library(),
            read_states=None
            if recorder is None
            else lambda text, tokens: recorder.take(text, (*prompts[text], *tokens)),
        )

    def _ban_pictures(self, params: SamplingParams) -> SamplingParams:
        """Return the settings that never sample a token of pictures."""
        pictures = self.language_model.pictures
        banned = frozenset() if pictures is None else pictures.banned_ids
        return replace(params, banned_ids=params.banned_ids | banned)

    def open_library(self) -> NativeLibrary | None:
        """Return the compiled program that draws tokens, if this model decodes with it."""
        return load_library() if self.language_model.decoding is Decoding.NATIVE else None

    def _open_recorder(
        self, requests: Sequence[SampleRequest], params: SamplingParams
    ) -> StateRecorder | None:
        # An update or a later call may use other weights than the overlay's. Of a text that
        # continues a kept text, only the end is read.
        if self.overlay or self.kept is not None:
            return None
        recording = Recording.plan(self.language_model, requests, params, learns=self.learns)
        return None if recording.is_empty else StateRecorder(self.language_model, recording)

    def sample_mixed(
        self,
        requests: Sequence[MixedRequest],
        teacher: SamplingClient,
        rule: TokenRule,
        params: SamplingParams,
    ) -> list[Sample]:
        """Sample each token by the rule. Both models read every token once.

        Returns one completion per request.
        """
        if not requests:
            return []
        params = self._ban_pictures(params)
        rows, length = self.batch_size, params.max_new_tokens
        teacher_prompts = [request.teacher_prompt_tokens for request in requests]
        loop = _DecodeLoop(
            self.open_decode_batch([request.prompt_tokens for request in requests], rows, length),
            [open_random_stream(request.seed) for request in requests],
            params,
            stop_check(params, self.language_model.tokenizer),
            library=self.open_library(),
            partner=_Partner(
                teacher.open_decode_batch(teacher_prompts, rows, length),
                [open_random_stream(request.teacher_seed) for request in requests],
                rule,
            ),
        )
        return run_to_end(loop, len(requests), rows)

    def open_decode_batch(
        self, prompts: Sequence[tuple[int, ...]], max_rows: int, max_new_tokens: int
    ) -> DecodeBatch:
        """Start decoding the prompts, `max_rows` at a time, up to `max_new_tokens` tokens each."""
        return open_decode_batch(
            self.language_model, self.overlay, prompts, max_rows, max_new_tokens, self.kept
        )

    @torch.no_grad()
    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """Return log-probabilities for a sampled signal, otherwise hidden states and the head."""
        model = self.language_model
        model.model.eval()
        signals: list[TeacherSignal] = []
        with model.weights(self.overlay):
            # Build the head over the overlay's storage, so that it outlives the block.
            layout = self.layout
            prepacked = PrepackedModel(model, 0) if layout is None else layout.open(model)
            head = prepacked.head
            store = HostStore(model.device, self.device_bytes)

            def compute(model: LanguageModel, texts: Sequence[ScoreRequest]) -> Tensor:
                prefixes = self.prefixes
                read = compute_hidden_states if prefixes is None else prefixes.compute_hidden_states
                # Log-probabilities are computed from the states immediately; only the states
                # themselves are stored.
                return (
                    read(model, texts) if signal.sampled else store.store_pass(read(model, texts))
                )

            limit = find_limits(model.device).scored_tokens
            recorded = [None if self.overlay else find_hidden(model, text) for text in requests]
            unknown = [
                text for text, hidden in zip(requests, recorded, strict=True) if hidden is None
            ]
            states = iterate_hidden_states(model, unknown, limit, compute)
            with prepacked.use(), show_wait("scores", len(requests)) as wait:
                for request, earlier in zip(requests, recorded, strict=True):
                    hidden = next(states) if earlier is None else earlier
                    if signal.sampled:
                        logprobs = self._compute_logprobs(head, hidden, request.tokens)
                        signals.append(TeacherSignal(logprobs=logprobs))
                    else:
                        signals.append(TeacherSignal(hidden=store.wrap_text(hidden), head=head))
                    wait.advance()
        return signals

    def _compute_logprobs(
        self, head: Head, hidden: Float[Tensor, "T D"], tokens: Sequence[int]
    ) -> Float[Tensor, " T"]:
        ids = fill_pictures(torch.tensor(tokens, dtype=torch.long, device=hidden.device))
        parts = [
            F.gather_logprobs(head.logprobs(hidden[part]), ids[part])
            for part in chunks(len(ids), self.chunk_tokens)
        ]
        return torch.cat(parts).cpu() if parts else torch.zeros(0)


class _Loop(Protocol):
    """A sampling call; `finished` counts the finished completions."""

    finished: int

    def run(self, rows: int) -> Steps:
        """Decode until all completions have ended, at most `rows` at a time."""
        ...


def run_to_end(loop: _Loop, count: int, rows: int) -> list[Sample]:
    """Decode `count` completions without pauses, and show the number of finished completions."""
    steps = loop.run(rows)
    with show_wait("answers", count) as wait:
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value
            wait.move_to(loop.finished)


@dataclass(frozen=True, slots=True)
class _Partner:
    """The second model of a call, its random streams, and the rule by which both models write."""

    batch: DecodeBatch
    streams: Sequence[torch.Generator]
    rule: TokenRule


class _DecodeLoop:
    """Generate all completions of a call, together with the `partner` if one is given.

    `check_stops` decides which completions end. A completion that ends frees its row for the next
    completion if every decode batch can refill. `library` draws the tokens if it is given, and
    `read_states` returns the states that were kept of a completion.
    """

    def __init__(
        self,
        policy: DecodeBatch,
        streams: Sequence[torch.Generator],
        params: SamplingParams,
        check_stops: Check,
        *,
        partner: _Partner | None = None,
        library: NativeLibrary | None = None,
        read_states: Callable[[int, Sequence[int]], TextStates | None] | None = None,
    ) -> None:
        self.library = library
        self.read_states = read_states
        self.policy = policy
        self.partner = partner
        self.params = params
        self.check_stops = check_stops
        self.batches = [policy] if partner is None else [policy, partner.batch]
        self.streams = streams
        self.tokens: list[list[int]] = [[] for _ in streams]
        self.sampling_logprobs: list[list[float]] = [[] for _ in streams]
        self.policy_logprobs: list[list[float]] = [[] for _ in streams]
        self.authors: list[list[int]] = [[] for _ in streams]
        self.ended: set[int] = set()
        self.waiting = iter(range(len(streams)))
        self.stopped: set[int] = set()
        self.finished = 0
        """The number of finished completions."""

    def run(self, rows: int) -> Steps:
        """Decode until all completions have ended; `active` lists the completion in each row."""
        active: list[int] = []
        if self.params.max_new_tokens:
            yield from self._fill_rows(active, rows)
        while active:
            abandon.check()
            next_tokens = self._draw(active)
            keep = compact_rows(self._find_unfinished(active))
            for batch in self.batches:
                batch.advance(next_tokens, keep)
            self.finished += len(active) - len(keep)
            active = [active[row] for row in keep]
            yield
            yield from self._fill_rows(active, rows)
        return [self._build_sample(text) for text in range(len(self.tokens))]

    def _fill_rows(self, active: list[int], rows: int) -> Generator[None, None, None]:
        """Start waiting completions in free rows, and yield after each prefill."""
        if not all(batch.supports_refill for batch in self.batches):
            # Texts that start together are read in one pass.
            active += [] if active else self._admit(rows)
            return
        # Admit one by one: an admission then runs at most one pass, and 64 prompts of a thousand
        # tokens do not block other work until all of them are read.
        while len(active) < rows and (admitted := self._admit(1)):
            active += admitted
            yield

    def _admit(self, most: int) -> list[int]:
        """Fill free rows with waiting completions, and return these completions."""
        counts = {batch.admit(most) for batch in self.batches}
        assert len(counts) == 1, "decode batches in lockstep admit the same texts"
        return [next(self.waiting) for _ in range(counts.pop())]

    def _find_unfinished(self, active: Sequence[int]) -> list[int]:
        """Return the rows with unfinished completions, and record the completions that stopped."""
        stops = self.check_stops([self.tokens[text] for text in active])
        self.stopped |= {text for text, stopped in zip(active, stops, strict=True) if stopped}
        most = self.params.max_new_tokens
        return [
            row
            for row, text in enumerate(active)
            if not (stops[row] or text in self.ended or len(self.tokens[text]) == most)
        ]

    def _draw(self, active: Sequence[int]) -> Tensor:
        """Sample one token for every row, and append it with its log-probabilities."""
        logits = self.policy.logits()
        streams = [self.streams[text] for text in active]
        noise = draw_exponentials(streams, logits.shape[-1]).to(logits.device)
        if self.partner is None:
            next_tokens, sampling, policy = sample_tokens(logits, self.params, noise, self.library)
        else:
            student = TokenReading(logits, self.params, noise, self.library)
            next_tokens, sampling, policy = self._write_together(self.partner, active, student)
        rows = zip(active, next_tokens.tolist(), sampling.tolist(), policy.tolist(), strict=True)
        for text, token, sampling_logprob, policy_logprob in rows:
            if math.isnan(sampling_logprob) or math.isnan(policy_logprob):
                raise build_divergence_error()
            self.tokens[text].append(token)
            self.sampling_logprobs[text].append(sampling_logprob)
            self.policy_logprobs[text].append(policy_logprob)
        return next_tokens

    def _write_together(
        self, partner: _Partner, active: Sequence[int], student: TokenReading
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return one token per row by the partner's rule, and record authors and ends."""
        logits = partner.batch.logits().to(student.logits.device)
        streams = [partner.streams[text] for text in active]
        noise = draw_exponentials(streams, logits.shape[-1]).to(logits.device)
        library = self.library if logits.dtype == student.logits.dtype else None
        teacher = TokenReading(logits, self.params, noise, library)
        joint = partner.rule.write(active, student, teacher)
        if joint.by_teacher is not None:
            for text, is_teachers in zip(active, joint.by_teacher.tolist(), strict=True):
                self.authors[text].append(AUTHORS.index("teacher" if is_teachers else "student"))
        if joint.ended is not None:
            self.ended |= {active[row] for row in joint.ended.nonzero()[:, 0].tolist()}
        return joint.tokens, joint.logprobs, student.compute_policy_logprobs(joint.tokens)

    def _build_sample(self, text: int) -> Sample:
        authors = self.authors[text]
        return Sample(
            tokens=torch.tensor(self.tokens[text], dtype=torch.long),
            sampling_logprobs=torch.tensor(self.sampling_logprobs[text], dtype=torch.float32),
            policy_logprobs=torch.tensor(self.policy_logprobs[text], dtype=torch.float32),
            stop_reason="stop" if text in self.stopped else "length",
            states=None if self.read_states is None else self.read_states(text, self.tokens[text]),
            authors=torch.tensor(authors, dtype=torch.uint8) if authors else None,
        )


def compact_rows(rows: Sequence[int]) -> list[int]:
    """Return the surviving rows without gaps; the last rows move into the gaps.

    No other row moves: moving copies a row's KV cache.
    """
    surviving = set(rows)
    moving = [row for row in rows if row >= len(rows)]
    return [row if row in surviving else moving.pop() for row in range(len(rows))]
