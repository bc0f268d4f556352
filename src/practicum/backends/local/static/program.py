"""Run the decode step as one program over tensors of fixed shape, replayed for several tokens.

A step draws a token for each row, stores it, tests it for a stop, and reads it through the body.
The host sends a table of the rows to the device, replays the step, and reads the stored tokens: one
transfer in each direction for any number of tokens.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum.backends.local.cached_texts import CachedTexts
from practicum.backends.local.decode_step import DecodeJob
from practicum.backends.local.drawing import sample_other_tokens, sample_tokens
from practicum.backends.local.static.attention import Attention, PageTable
from practicum.backends.local.static.body import StaticBody
from practicum.backends.local.static.capture import Capture, Step
from practicum.backends.local.static.noise import WORDS, draw_exponentials_on_device, read_stream
from practicum.backends.local.static.pages import PagePool
from practicum.backends.local.static.weights import StaticWeights
from practicum.types import SamplingParams

SLOT, LENGTH, LEFT, PAGES = range(4)
"""The columns of the table: a row's slot, tokens so far, remaining tokens, and pages."""

NO_TOKEN = -1
"""Stored for a row that ended before a step."""


@dataclass(frozen=True, slots=True)
class StaticSettings:
    """The settings of a static program; the host reads results after every `window` tokens.

    They change completions only by rounding.
    """

    attend: Attention
    capture: Capture
    window: int = 16
    page_tokens: int = 256
    """The flash kernel takes pages of multiples of 256 tokens."""
    most_bytes: int = sys.maxsize
    """Memory for keys and values: rows that exceed it wait, but one row always runs."""
    kept: CachedTexts | None = None
    """The kept texts, which later calls continue."""


@dataclass(slots=True)
class StaticRow:
    """A completion that is being decoded: its slot, its tokens so far, and their pages."""

    text: int
    slot: int
    length: int
    left: int
    pages: list[int]


@dataclass(frozen=True, slots=True)
class WrittenTokens:
    """The tokens of a window with their log-probabilities; `NO_TOKEN` after a row's end."""

    tokens: Int[Tensor, "N B"]
    sampling_logprobs: Float[Tensor, "N B"]
    policy_logprobs: Float[Tensor, "N B"]


class StaticProgram:
    """The step over slots; a slot keeps a completion's hidden state and random stream.

    One more slot and page 0 belong to rows without a completion.
    """

    def __init__(
        self,
        job: DecodeJob,
        weights: StaticWeights,
        params: SamplingParams,
        settings: StaticSettings,
        most_pages: int,
    ) -> None:
        device, llama = job.device, weights.llama
        self._params = params
        self._settings = settings
        self._rows = job.rows
        self._head = job.language_model.head().detached()
        shape = llama.groups, llama.head_width
        self.pool = PagePool(
            len(weights.layers), shape, weights.dtype, device, settings.page_tokens, most_pages
        )
        self._body = StaticBody(
            job.language_model, weights, self.pool, settings.attend, job.longest
        )
        self._widest = self.pool.count_pages(job.longest)
        self._hidden = torch.zeros(
            job.rows + 1, llama.embedding.shape[1], dtype=weights.wide, device=device
        )
        self._streams = torch.zeros(job.rows + 1, WORDS, dtype=torch.long, device=device)
        self._table = torch.zeros(job.rows, PAGES + self._widest, dtype=torch.long, device=device)
        self._written = torch.zeros(settings.window, 3, job.rows, dtype=torch.int32, device=device)
        self._count = torch.zeros(1, dtype=torch.long, device=device)
        self._stops = torch.tensor(sorted(params.stop_ids), dtype=torch.long, device=device)
        self._banned = torch.tensor(sorted(params.banned_ids), dtype=torch.long, device=device)
        self._replays: dict[tuple[int, int], Step] = {}
        self._version = self.pool.version

    def start(self, slot: int, hidden: Float[Tensor, " D"], seed: int) -> None:
        """Give a slot to a completion; `hidden` is the last hidden state of its prompt."""
        self._hidden[slot] = hidden
        self._streams[slot] = read_stream(seed).to(self._streams.device)

    def fits(self, lengths: Sequence[int]) -> bool:
        """Return True if texts of these lengths may decode at once; one text always may."""
        pages = sum(map(self.pool.count_pages, lengths))
        return len(lengths) == 1 or pages * self.pool.page_bytes <= self._settings.most_bytes

    @torch.no_grad()
    def run(self, rows: Sequence[StaticRow]) -> WrittenTokens:
        """Draw tokens for all rows: a full window, or fewer if no row may draw as many."""
        steps = min(self._settings.window, max(row.left for row in rows))
        self._reserve_pages(rows, steps)
        width = _round_up(max(len(row.pages) for row in rows), self._widest)
        replay = self._find_replay(_round_up(len(rows), self._rows), width)
        self._set_table(rows)
        for _ in range(steps):
            replay()
        lines = self._written[:steps, :, : len(rows)].cpu()
        logprobs = lines[:, 1:].contiguous().view(torch.float32)
        return WrittenTokens(lines[:, 0], logprobs[:, 0], logprobs[:, 1])

    def _reserve_pages(self, rows: Sequence[StaticRow], steps: int) -> None:
        """Give each row the pages of the tokens that it may draw in this window."""
        lacking = [
            self.pool.count_pages(row.length + min(steps, row.left)) - len(row.pages)
            for row in rows
        ]
        self.pool.reserve(sum(lacking))
        for row, count in zip(rows, lacking, strict=True):
            row.pages += self.pool.take(count)

    def _find_replay(self, rows: int, width: int) -> Step:
        """Return the step for `rows` rows of `width` pages, captured on first use."""
        if self._version != self.pool.version:
            # A captured step holds the addresses of the stores.
            self._replays.clear()
            self._version = self.pool.version
        if (rows, width) not in self._replays:
            # No row is active: the runs before a capture only change the spare slot and page 0.
            self._table.zero_()[:, SLOT].fill_(self._rows)
            self._replays[rows, width] = self._settings.capture(lambda: self.step(rows, width))
        return self._replays[rows, width]

    def _set_table(self, rows: Sequence[StaticRow]) -> None:
        """Write the rows into the device's table; remaining rows have no completion."""
        table = torch.zeros(self._table.shape, dtype=torch.long)
        table[:, SLOT] = self._rows
        for number, row in enumerate(rows):
            entries = [row.slot, row.length, row.left, *row.pages]
            table[number, : len(entries)] = torch.tensor(entries)
        if self._table.is_cuda:
            table = table.pin_memory()
        self._table.copy_(table, non_blocking=True)
        self._count.zero_()

    def step(self, count: int, width: int) -> None:
        """Draw, store, test and read one token for each of the first `count` rows."""
        table = self._table[:count]
        slots, lengths, remaining = table[:, SLOT], table[:, LENGTH].clone(), table[:, LEFT]
        active = remaining > 0
        tokens, *logprobs = self._draw(slots)
        lines = [torch.where(active, tokens, NO_TOKEN).int()]
        lines += [values.float().view(torch.int32) for values in logprobs]
        self._written[:, :, :count].index_copy_(0, self._count, torch.stack(lines)[None])
        # A short window has fewer lines than there are runs before a capture.
        self._count.add_(1).remainder_(self._settings.window)
        has_stopped = (tokens[:, None] == self._stops).any(dim=1)
        remaining.copy_(torch.where(has_stopped, 0, (remaining - 1).clamp(min=0)))
        table[:, LENGTH] += active
        pages = PageTable.build(
            table[:, PAGES : PAGES + width], lengths, active, self._settings.page_tokens
        )
        self._hidden.index_copy_(0, slots, self._body.read(tokens, lengths, pages))

    def _draw(self, slots: Int[Tensor, " B"]) -> tuple[Tensor, Tensor, Tensor]:
        """Sample the next token of each slot, and advance the slot's random stream."""
        logits = self._head.logits(self._hidden.index_select(0, slots))
        if self._params.temperature == 0:
            noise = logits.new_zeros(len(logits), 0, dtype=torch.float64)
        else:
            states = self._streams.index_select(0, slots)
            noise, states = draw_exponentials_on_device(states, logits.shape[-1])
            self._streams.index_copy_(0, slots, states)
        if len(self._banned):
            return sample_other_tokens(logits, self._params, noise, self._banned)
        return sample_tokens(logits, self._params, noise)


def _round_up(count: int, most: int) -> int:
    """Return the next power of two, at most `most`, so that few different steps are captured."""
    return min(1 << (count - 1).bit_length(), most)
