"""Keep the keys and values of texts that later calls continue, such as conversations.

A turn of a conversation begins with all earlier turns. If their keys and values are kept, a call
only reads the new tokens: the last sampled token, which was never read, and the reply to it.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.backends.local.attention import LayerStates, PrefixStates, attend
from practicum.backends.local.language_model import LanguageModel
from practicum.costs.segments import find_longest_beginning

MAX_BYTES = 2**30
"""The maximum number of bytes of kept keys and values; texts beyond it are read again."""


class CachedTexts:
    """The keys and values of texts of one model; its weights must not change in the meantime.

    The least recently used text is dropped first if there is no more room.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._texts: OrderedDict[tuple[int, ...], PrefixStates] = OrderedDict()
        # Counted when texts are added and dropped: scanning all texts for each text would be
        # quadratic.
        self._lengths: Counter[int] = Counter()

    def find(self, prompt: tuple[int, ...]) -> PrefixStates | None:
        """Return the longest kept text that is a prefix of a longer prompt, if there is one."""
        beginning = find_longest_beginning(prompt, self._texts, self._lengths)
        if beginning is None:
            return None
        self._texts.move_to_end(beginning)
        return self._texts[beginning]

    def keep(self, text: PrefixStates) -> None:
        """Keep a text, and drop the kept text that it continues."""
        shorter = self.find(text.tokens)
        if shorter is not None:
            self._drop(shorter.tokens)
        self._drop(text.tokens)
        self._texts[text.tokens] = text
        self._lengths[len(text.tokens)] += 1
        self._bytes += _count_bytes(text)
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._texts)))

    def _drop(self, tokens: tuple[int, ...]) -> None:
        if tokens in self._texts:
            self._bytes -= _count_bytes(self._texts.pop(tokens))
            self._lengths[len(tokens)] -= 1
            if not self._lengths[len(tokens)]:
                del self._lengths[len(tokens)]


def _count_bytes(text: PrefixStates) -> int:
    return sum(states.nbytes for states in chain.from_iterable(text.kv_by_layer.values()))


@dataclass(frozen=True, slots=True)
class Continuation:
    """A kept text, and the tokens after it that are still to be read."""

    kept: PrefixStates
    tokens: tuple[int, ...]


class ContinuedBatch:
    """Continuations of texts in one row of tokens; each token only attends to its own text.

    Implements `practicum.backends.local.attention.AttentionLayout`. `kv_by_layer` collects the keys
    and values of the whole texts, end to end; `parts[i]` is the part of text i.
    """

    def __init__(self, texts: Sequence[Continuation], device: torch.device) -> None:
        self._texts = texts
        counts = [len(text.tokens) for text in texts]
        self._rows = [slice(*ends) for ends in pairwise(accumulate(counts, initial=0))]
        lengths = [len(text.kept.tokens) + count for text, count in zip(texts, counts, strict=True)]
        self.parts = [range(*ends) for ends in pairwise(accumulate(lengths, initial=0))]
        self._ids = torch.tensor([token for text in texts for token in text.tokens], device=device)
        places = [
            range(len(text.kept.tokens), length)
            for text, length in zip(texts, lengths, strict=True)
        ]
        self._positions = torch.tensor(list(chain.from_iterable(places)), device=device)
        self.kv_by_layer: dict[int, LayerStates] = {}

    @torch.no_grad()
    def compute_last_states(self, model: LanguageModel) -> Float[Tensor, "B D"]:
        """Return the hidden state after the last token of each text."""
        hidden = model.forward_packed(self._ids, self._positions, self)
        return hidden[[row.stop - 1 for row in self._rows]]

    def attend(
        self,
        layer: int,
        queries: Float[Tensor, "T H d"],
        keys: Float[Tensor, "T G d"],
        values: Float[Tensor, "T G e"],
        scale: float | None,
        dropout: float,
    ) -> Float[Tensor, "T H e"]:
        """Compute one layer's attention text by text, and collect the keys and values."""
        # There are few texts compared with the tokens of a turn: padding all texts to the longest
        # history would cost more for copies than one attention call per text.
        outputs: list[Tensor] = []
        states_by_text: list[LayerStates] = []
        for text, row in zip(self._texts, self._rows, strict=True):
            kept_keys, kept_values = text.kept.kv_by_layer[layer]
            states = torch.cat([kept_keys, keys[row]]), torch.cat([kept_values, values[row]])
            new_queries, seen_keys, seen_values = (
                heads.transpose(0, 1)[None] for heads in (queries[row], *states)
            )
            mask = _build_mask(len(text.kept.tokens), queries[row])
            output = attend(new_queries, seen_keys, seen_values, mask, scale, dropout=dropout)
            outputs.append(output[0].transpose(0, 1))
            states_by_text.append(states)
        keys_by_text, values_by_text = zip(*states_by_text, strict=True)
        self.kv_by_layer[layer] = torch.cat(keys_by_text), torch.cat(values_by_text)
        return torch.cat(outputs)


def _build_mask(past: int, queries: Float[Tensor, "T H d"]) -> Float[Tensor, "1 1 T M"] | None:
    """Return the mask of queries that each see `past` keys and all later keys up to their own."""
    count = len(queries)
    if count == 1:
        return None
    mask = torch.full((count, past + count), -torch.inf, device=queries.device, dtype=queries.dtype)
    return mask.triu_(diagonal=past + 1)[None, None]
