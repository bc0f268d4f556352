"""Sample completions with the static program, window by window.

Between two windows the host reads the drawn tokens, ends completions, and starts new completions in
their rows. Tokens after a completion's end are dropped, so a completion does not depend on the
window's length.
"""

from collections.abc import Generator, Mapping, Sequence

import torch
from torch import Tensor

from practicum.backends.local.cached_texts import CachedTexts
from practicum.backends.local.decode_step import DecodeJob, PromptTokens, Steps
from practicum.backends.local.drawing import build_divergence_error
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.packing import PrefixStates
from practicum.backends.local.prefill import PromptQueue
from practicum.backends.local.prepared import PrepackedModel
from practicum.backends.local.rounding import round_linear_maps
from practicum.backends.local.static.program import (
    NO_TOKEN,
    StaticProgram,
    StaticRow,
    StaticSettings,
    WrittenTokens,
)
from practicum.backends.local.static.weights import pack_weights
from practicum.core import abandon
from practicum.text import Check
from practicum.types import Sample, SampleRequest, SamplingParams


class StaticLoop:
    """Generate the completions of a call; the next completion takes the row of a finished one."""

    def __init__(
        self,
        job: DecodeJob,
        program: StaticProgram,
        requests: Sequence[SampleRequest],
        params: SamplingParams,
        settings: StaticSettings,
        check_stops: Check,
    ) -> None:
        self._job = job
        self._program = program
        self._requests = requests
        self._params = params
        self._window = settings.window
        self._check_stops = check_stops
        self._waiting = PromptQueue(job)
        self._tokens: list[list[int]] = [[] for _ in requests]
        self._logprobs: list[list[Tensor]] = [[] for _ in requests]
        self._stopped: set[int] = set()
        self.finished = 0
        """The number of finished completions."""

    def run(self, rows: int) -> Steps:
        """Decode until all completions have ended, at most `rows` at a time."""
        active: list[StaticRow] = []
        rows = min(rows, self._job.rows) if self._params.max_new_tokens else 0
        self._reserve_first_pages(rows)
        yield from self._fill_rows(active, rows)
        while active:
            abandon.check()
            ended = self._end_rows(active, self._program.run(active))
            active = [row for row in active if row.text not in ended]
            yield
            yield from self._fill_rows(active, rows)
        return [self._build_sample(text) for text in range(len(self._requests))]

    def _reserve_first_pages(self, rows: int) -> None:
        """Reserve the pages of the first window together: a store is copied each time it grows."""
        pool, prompts = self._program.pool, self._job.prompts[:rows]
        longest = [self._find_longest(text) for text in range(len(prompts))]
        while len(longest) > 1 and not self._program.fits(longest):
            longest.pop()
        starts = [len(prompt) + self._window for prompt in prompts]
        pool.reserve(sum(map(pool.count_pages, map(min, starts, longest))))

    def _find_longest(self, text: int) -> int:
        """Return the maximum number of tokens of a completion with its prompt."""
        return len(self._job.prompts[text]) + self._params.max_new_tokens

    @torch.no_grad()
    def _fill_rows(self, active: list[StaticRow], rows: int) -> Generator[None, None, None]:
        """Start waiting completions in free slots, and yield after each."""
        free = sorted(set(range(rows)) - {row.slot for row in active})
        pool = self._program.pool
        for slot in free[: len(self._waiting)]:
            text = len(self._requests) - len(self._waiting)
            growing = [row.length + row.left for row in active]
            if not self._program.fits([*growing, self._find_longest(text)]):
                return
            prompt = self._waiting.pop()
            length = len(prompt.indices)
            pool.reserve(pool.count_pages(length))
            pages = pool.take(pool.count_pages(length))
            pool.store_prompt(pages, prompt.kv_by_layer, prompt.indices)
            self._program.start(slot, prompt.last_hidden, self._requests[text].seed)
            active.append(StaticRow(text, slot, length, self._params.max_new_tokens, pages))
            yield

    def _end_rows(self, active: Sequence[StaticRow], window: WrittenTokens) -> set[int]:
        """Store a window's tokens; free the pages of finished completions, and return these."""
        counts = (window.tokens != NO_TOKEN).sum(dim=0).tolist()
        columns = window.tokens.T.tolist()
        pairs = torch.stack([window.sampling_logprobs, window.policy_logprobs]).transpose(0, 2)
        ended: set[int] = set()
        for row, count, column, logprobs in zip(active, counts, columns, pairs, strict=True):
            count = self._take_tokens(row.text, column[:count])
            if torch.isnan(logprobs[:count]).any():
                raise build_divergence_error()
            self._logprobs[row.text].append(logprobs[:count].T)
            row.length += count
            row.left -= count
            if row.text in self._stopped or not row.left:
                ended.add(row.text)
                if self._job.kept is not None:
                    self._keep_text(self._job.kept, row)
                self._program.pool.give_back(row.pages)
        self.finished += len(ended)
        return ended

    def _keep_text(self, store: CachedTexts, row: StaticRow) -> None:
        """Keep a completion with its prompt, without its last token."""
        # A continued text needs at least one token to read, so the last token is left for that.
        text = (*self._job.prompts[row.text], *self._tokens[row.text][:-1])
        store.keep(PrefixStates(text, self._program.pool.read_text(row.pages, len(text))))

    def _take_tokens(self, text: int, tokens: Sequence[int]) -> int:
        """Append tokens up to the first at which the completion stops; return their number."""
        completion = self._tokens[text]
        for count, token in enumerate(tokens, start=1):
            completion.append(token)
            # Stop tokens end a row on the device; only stop texts are searched after every token.
            if (count == len(tokens) or self._params.stop_texts) and self._check_stops(
                [completion]
            )[0]:
                self._stopped.add(text)
                return count
        return len(tokens)

    def _build_sample(self, text: int) -> Sample:
        logprobs = torch.cat([torch.zeros(2, 0), *self._logprobs[text]], dim=1)
        return Sample(
            tokens=torch.tensor(self._tokens[text], dtype=torch.long),
            sampling_logprobs=logprobs[0].clone(),
            policy_logprobs=logprobs[1].clone(),
            stop_reason="stop" if text in self._stopped else "length",
        )


def open_static_loop(
    language_model: LanguageModel,
    overlay: Mapping[str, Tensor],
    requests: Sequence[SampleRequest],
    params: SamplingParams,
    rows: int,
    check_stops: Check,
    settings: StaticSettings,
) -> StaticLoop | None:
    """Start sampling, or return None if the static program does not support model or texts."""
    prompts = [request.prompt_tokens for request in requests]
    longest = max(map(len, prompts)) + params.max_new_tokens
    language_model.check_length(longest)
    if longest > language_model.max_packed_tokens:
        return None
    language_model.model.eval()
    with language_model.weights(overlay), torch.no_grad():
        weights = pack_weights(language_model)
        if weights is None:
            return None
        prepacked = PrepackedModel(language_model, 0)
        rows = min(rows, len(prompts))
        job = DecodeJob(
            language_model,
            {**overlay, **round_linear_maps(language_model)},
            prepacked,
            prompts,
            rows,
            longest,
            settings.kept,
        )
        pages = count_most_pages(prompts, params.max_new_tokens, rows, settings.page_tokens)
        program = StaticProgram(job, weights, params, settings, pages)
    return StaticLoop(job, program, requests, params, settings, check_stops)


def count_most_pages(
    prompts: Sequence[PromptTokens], new_tokens: int, rows: int, page_tokens: int
) -> int:
    """Return the pages of the longest `rows` texts: no batch of these prompts needs more."""
    pages = sorted(-(-(len(prompt) + new_tokens) // page_tokens) for prompt in prompts)
    return sum(pages[-rows:])
