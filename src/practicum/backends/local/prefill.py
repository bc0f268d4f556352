"""Read waiting prompts before their completions, each distinct prompt once."""

import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, islice

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum.backends.local.cached_texts import Continuation, ContinuedBatch
from practicum.backends.local.decode_step import DecodeJob, LayerStates, PromptTokens
from practicum.backends.local.device_limits import find_limits
from practicum.backends.local.language_model import record_layers
from practicum.backends.local.packing import PackedBatch
from practicum.costs.segments import count_fitting_texts
from practicum.types import ScoreRequest


@dataclass(frozen=True, slots=True)
class PrefilledPrompt:
    """The KV cache and last hidden state of a prompt, stored until its last completion starts.

    `kv_by_layer` covers all prompts of one prefill; `indices` select this prompt's tokens. `lower`
    are its states after the job's `captured` layers, None without such layers.
    """

    kv_by_layer: Mapping[int, LayerStates]
    indices: Int[Tensor, " L"]
    last_hidden: Float[Tensor, " D"]
    lower: Float[Tensor, "L F"] | None = None


class PromptQueue:
    """The prompts of a decode batch that wait for a row; `len` is the number of prompts."""

    def __init__(self, job: DecodeJob) -> None:
        self._job = job
        self._next = 0
        self._pending_counts = Counter(job.prompts)
        self.prefilled: dict[PromptTokens, PrefilledPrompt] = {}
        """The prompts that were read and still have completions to start."""

    def __len__(self) -> int:
        return len(self._job.prompts) - self._next

    @property
    def next_prompt(self) -> PromptTokens:
        """The tokens of the prompt that `pop` returns."""
        return self._job.prompts[self._next]

    def pop(self) -> PrefilledPrompt:
        """Return the next prompt, and prefill it first if necessary."""
        prompt = self.next_prompt
        if prompt not in self.prefilled:
            self._run_prefill()
        chosen = self.prefilled[prompt]
        self._next += 1
        self._pending_counts[prompt] -= 1
        if not self._pending_counts[prompt]:
            del self.prefilled[prompt]
        return chosen

    def _run_prefill(self) -> None:
        """Prefill distinct waiting prompts, up to the device's limit and the number of rows."""
        chosen: dict[PromptTokens, None] = {}
        for prompt in islice(self._job.prompts, self._next, None):
            if prompt not in self.prefilled:
                chosen[prompt] = None
            if len(chosen) == self._job.rows:
                break
        going_on = self._read_continuations(chosen)
        # Token 0 is a placeholder for the completion: the prompt's last hidden state predicts it,
        # and a text's last token is never read.
        requests = [ScoreRequest(prompt, (0,)) for prompt in chosen if prompt not in going_on]
        if not requests:
            return
        # A shared prefix of prompts is read once, so it counts once.
        most_tokens = find_limits(self._job.device).prefill_tokens
        requests = requests[: count_fitting_texts(requests, 0, most_tokens, sys.maxsize)]
        batch = PackedBatch(requests, self._job.device, keep_kv=True)
        assert batch.kv_by_layer is not None
        with self._job.weights() as model, record_layers(model, self._job.captured) as states:
            hidden = batch.compute_hidden_states(model)
        lower = torch.cat(states, dim=-1)[0] if states else None
        for request, indices, last in zip(requests, batch.locate_tokens(), hidden, strict=True):
            self.prefilled[request.prompt_tokens] = PrefilledPrompt(
                batch.kv_by_layer, indices, last, None if lower is None else lower[indices]
            )

    def _read_continuations(self, prompts: Iterable[PromptTokens]) -> set[PromptTokens]:
        """Return the prompts that continue kept texts, and prefill the first of them."""
        store = self._job.kept
        beginnings = {prompt: None if store is None else store.find(prompt) for prompt in prompts}
        texts = [
            Continuation(text, prompt[len(text.tokens) :])
            for prompt, text in beginnings.items()
            if text is not None
        ]
        going_on = {prompt for prompt, text in beginnings.items() if text is not None}
        if not texts:
            return going_on
        limit = find_limits(self._job.device).prefill_tokens
        reach = list(accumulate(len(text.tokens) for text in texts))
        texts = texts[: max(bisect_right(reach, limit), 1)]
        batch = ContinuedBatch(texts, self._job.device)
        with self._job.weights() as model:
            hidden = batch.compute_last_states(model)
        for text, part, last in zip(texts, batch.parts, hidden, strict=True):
            prompt = (*text.kept.tokens, *text.tokens)
            indices = torch.arange(part.start, part.stop, device=self._job.device)
            self.prefilled[prompt] = PrefilledPrompt(batch.kv_by_layer, indices, last)
        return going_on
