"""Count the bytes of sampling on a GPU: run the static step over a model without weights."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from practicum.backends.local.decode_step import DecodeJob, PromptTokens
from practicum.backends.local.device_limits import DeviceLimits
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.paper import LiveBytes
from practicum.backends.local.prepared import MIN_DECODE_STEPS, PrepackedModel
from practicum.backends.local.rounding import round_linear_maps
from practicum.backends.local.sizes import measure_dims
from practicum.backends.local.static.attention import PageTable, can_attend_by_flash
from practicum.backends.local.static.capture import run_eagerly
from practicum.backends.local.static.loop import count_most_pages
from practicum.backends.local.static.program import StaticProgram, StaticSettings
from practicum.backends.local.static.weights import StaticWeights, pack_weights
from practicum.costs.segments import count_fitting_texts, count_packed_tokens
from practicum.types import SamplingParams, ScoreRequest

LOGIT_TILES = 4
"""Matrices of [rows, V] in a step through transformers' modules, in float32."""


@dataclass(frozen=True, slots=True)
class SamplingOnPaper:
    """A sampling call on a GPU, for a `model` on the meta device.

    Completions have `new_tokens` tokens, at most the parameters'; up to `rows` decode at once.
    `forward` is the memory per token of a pass through the layers. Without `is_static`,
    transformers' modules decode.
    """

    model: LanguageModel
    prompts: Sequence[PromptTokens]
    new_tokens: int
    params: SamplingParams
    limits: DeviceLimits
    rows: int
    forward: int
    is_static: bool

    def measure(self) -> dict[str, int]:
        """Return the bytes of the most expensive moment of the call, by item."""
        rows = min(self.rows, len(self.prompts))
        longest = max(map(len, self.prompts), default=0) + self.params.max_new_tokens
        model = self.model
        with LiveBytes(model.model.parameters()) as live, torch.no_grad():
            steps = self.params.max_new_tokens if self.is_static and rows else 0
            weights = pack_weights(model) if steps >= MIN_DECODE_STEPS else None
            overlay, prepacked = round_linear_maps(model), PrepackedModel(model, 0)
            if weights is not None:
                job = DecodeJob(model, overlay, prepacked, self.prompts, rows, longest)
                return self._measure_static(live, job, weights)
            step = LOGIT_TILES * 4 * rows * model.vocab_size
            return {
                "weights for decoding": live.total,
                "keys and values": rows * longest * self._token_bytes,
                "prefill or decode step": max(self._count_prefill(rows), step),
            }

    def _measure_static(
        self, live: LiveBytes, job: DecodeJob, weights: StaticWeights
    ) -> dict[str, int]:
        has_flash = can_attend_by_flash(
            torch.device("cuda"), weights.dtype, weights.llama.head_width
        )
        attend = _attend_in_place if has_flash else _attend_over_copies
        settings = StaticSettings(attend, run_eagerly, most_bytes=self.limits.decode_bytes)
        new_tokens, page = self.params.max_new_tokens, settings.page_tokens
        most = count_most_pages(self.prompts, new_tokens, job.rows, page)
        program = StaticProgram(job, weights, self.params, settings, most)
        pool, packed = program.pool, live.total
        # Reserve as the loop does: the pages of the first window, and more as the texts grow.
        longest = [len(prompt) + new_tokens for prompt in self.prompts[: job.rows]]
        while len(longest) > 1 and not program.fits(longest):
            longest.pop()
        rows = len(longest)
        starts = [len(prompt) + settings.window for prompt in self.prompts]
        first = sum(map(pool.count_pages, map(min, starts, longest)))
        needed = count_most_pages(self.prompts, min(self.new_tokens, new_tokens), rows, page)
        pool.reserve(first)
        stored = live.total - packed
        for count in range(first, needed, rows):
            pool.reserve(min(count + rows, needed))
        stores = live.total - packed
        program.step(rows, pool.count_pages(job.longest))
        # If more completions wait, their prompts are read while the pages are full.
        prefill = self._count_prefill(rows) + (stores if rows < len(self.prompts) else stored)
        return {
            "weights for decoding": packed,
            "keys and values": stores,
            "prefill or decode step": max(prefill - stores, live.peak - packed - stores),
        }

    @property
    def _token_bytes(self) -> int:
        """The bytes of the keys and values of a token."""
        item = 2 if self.model.autocast else self.model.model.dtype.itemsize
        return measure_dims(self.model).count_kv_bytes(1, item)

    def _count_prefill(self, rows: int) -> int:
        """Return the bytes of reading prompts: activations, and keys and values until they are in pages."""
        texts = [ScoreRequest(prompt, (0,)) for prompt in dict.fromkeys(self.prompts)]
        most = self.limits.prefill_tokens
        count = min(count_fitting_texts(texts, 0, most, sys.maxsize), rows) if texts else 0
        # The keys and values of the pass before are still there while the next pass runs.
        passes = min(-(-len(texts) // max(count, 1)), 2)
        tokens = count_packed_tokens(texts[:count]) if count else 0
        return tokens * (self.forward + passes * self._token_bytes)


def _attend_in_place(queries: Tensor, *_: object) -> Tensor:
    """Take the place of the flash kernel, which reads pages where they are."""
    return torch.empty_like(queries)


def _attend_over_copies(queries: Tensor, keys: Tensor, values: Tensor, table: PageTable) -> Tensor:
    """Take the place of a kernel with a mask, which reads copies of the pages."""
    copies = keys[table.pages], values[table.pages]
    return torch.empty_like(queries, dtype=copies[0].dtype)
