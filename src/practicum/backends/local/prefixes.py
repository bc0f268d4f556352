"""Keep the keys and values of the prefix that a frozen model's texts share.

A teacher reads the same worked examples or instructions before the texts of every step. Within a
pass they are computed once; a teacher with constant weights computes them once per run.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.packing import PackedBatch, PrefixStates, compute_hidden_states
from practicum.costs.segments import find_shared_prefixes
from practicum.types import ScoreRequest

MAX_BYTES = 256 * 2**20
"""The maximum number of bytes of kept keys and values; a longer prefix is computed in each pass."""


class PrefixStore:
    """Hold the newest prefix of the texts of one model; its weights must not change.

    The prefix is always computed in a separate pass, so the bits of a text's states do not depend
    on the content of the store.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._newest: PrefixStates | None = None

    @torch.no_grad()
    def compute_hidden_states(
        self, language_model: LanguageModel, texts: Sequence[ScoreRequest]
    ) -> Float[Tensor, "T D"]:
        """Compute the states as `practicum.backends.local.packing.compute_hidden_states` does."""
        lengths = [(text.prompt_tokens, max(len(text.tokens) - 1, 0)) for text in texts]
        longest = max(len(prompt) + count for prompt, count in lengths) + 1
        language_model.check_length(longest)
        root = find_shared_prefixes(lengths).root
        if not root or longest > language_model.max_packed_tokens:
            return compute_hidden_states(language_model, texts)
        prefix = self._read_prefix(language_model, texts[0].prompt_tokens[:root])
        batch = PackedBatch(texts, language_model.device, prefix=prefix)
        return batch.compute_hidden_states(language_model)

    def _read_prefix(self, language_model: LanguageModel, tokens: tuple[int, ...]) -> PrefixStates:
        """Return the prefix's states, from the store if it holds them on the model's device."""
        prefix = self._newest
        if prefix is not None and prefix.tokens == tokens:
            keys, _ = next(iter(prefix.kv_by_layer.values()))
            if keys.device == language_model.device:
                return prefix
        # Token 0 is a placeholder for a completion: a text's last token is never read.
        batch = PackedBatch([ScoreRequest(tokens, (0,))], language_model.device, keep_kv=True)
        batch.compute_hidden_states(language_model)
        assert batch.kv_by_layer is not None
        prefix = PrefixStates(tokens, batch.kv_by_layer)
        size = sum(states.nbytes for states in chain.from_iterable(prefix.kv_by_layer.values()))
        self._newest = prefix if size <= self._max_bytes else None
        return prefix
