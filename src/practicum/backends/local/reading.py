"""Reading texts token by token with a model's keys and values kept; see `practicum.ports.Reading`.

`SlotDecodeBatch` gives every text a slot of a store that is made once. A text that ends leaves its slot to the next one at once,
so that no slot waits for the longest text; nothing is padded. `PaddedDecodeBatch` is for the models that cannot be packed (see
`practicum.backends.local.packing.enable_packing`): texts start together and the batch ends with its last one.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache

from practicum.backends.local.attention import attend
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.packing import PackedBatch, pad_sequences
from practicum.backends.local.prepared import PrepackedModel
from practicum.costs.segments import common_beginning
from practicum.errors import ModelError
from practicum.ports import DecodeBatch
from practicum.types import ScoreRequest

MAX_PREFILL_TOKENS = 1024
"""So many tokens of waiting prompts are read in one go when a slot is free."""

Prompt = tuple[int, ...]


def open_decode_batch(
    language_model: LanguageModel,
    overlay: Mapping[str, Tensor],
    prompts: Sequence[Prompt],
    rows: int,
    new_tokens: int,
) -> DecodeBatch:
    """Read the prompts, at most `rows` at a time, with room for `new_tokens` after each.

    Raises ModelError where the model cannot be read token by token.
    """
    if language_model.unsampled:
        raise ModelError(f"{language_model.unsampled}; use another architecture")
    longest = max(map(len, prompts), default=0) + new_tokens
    language_model.model.eval()
    with language_model.weights(overlay):
        prepared = PrepackedModel(language_model, new_tokens)
    work = DecodeJob(language_model, overlay, prepared, prompts, min(rows, len(prompts)), longest)
    return (
        SlotDecodeBatch(work) if longest <= language_model.packs_up_to else PaddedDecodeBatch(work)
    )


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """What is to be read, with what: at most `rows` texts at a time, none longer than `longest` tokens."""

    language_model: LanguageModel
    overlay: Mapping[str, Tensor]
    prepared: PrepackedModel
    prompts: Sequence[Prompt]
    rows: int
    longest: int

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.language_model.device

    @contextlib.contextmanager
    def weights(self) -> Iterator[LanguageModel]:
        """The model, within the block under the overlay's weights as they were made ready."""
        with self.language_model.weights(self.overlay), self.prepared.use():
            yield self.language_model


@dataclass(frozen=True, slots=True)
class _PrefilledPrompt:
    """What is kept of a prompt until its last completion has begun: keys and values by layer, its last hidden state."""

    kept: Mapping[int, tuple[Float[Tensor, "T G d"], Float[Tensor, "T G e"]]]
    places: Int[Tensor, " L"]
    last_hidden: Float[Tensor, " D"]


class SlotDecodeBatch:
    """Texts in slots; see `practicum.ports.Reading`. Row r is the text in slot r, and the rows have no holes.

    It is the `practicum.backends.local.attention.AttentionLayout` of its own steps.
    """

    refills = True

    def __init__(self, work: DecodeJob) -> None:
        self._work = work
        self._next = 0
        self._uses = Counter(work.prompts)
        self._read: dict[Prompt, _PrefilledPrompt] = {}
        self._keys: dict[int, Float[Tensor, "R G M d"]] = {}
        self._values: dict[int, Float[Tensor, "R G M e"]] = {}
        self._lengths: list[int] = []
        self._hidden: Float[Tensor, "B D"] | None = None
        self._at: tuple[Tensor, Tensor, int, Tensor | None] | None = None

    @torch.no_grad()
    def admit(self, most: int) -> int:
        """As `practicum.ports.Reading` says."""
        admitted = min(
            most, self._work.rows - len(self._lengths), len(self._work.prompts) - self._next
        )
        states = [] if self._hidden is None else [self._hidden]
        for _ in range(admitted):
            prompt = self._work.prompts[self._next]
            if prompt not in self._read:
                self._prefill_waiting()
            known = self._read[prompt]
            self._copy_to_slot(len(self._lengths), known)
            states.append(known.last_hidden[None])
            self._lengths.append(len(prompt))
            self._next += 1
            self._uses[prompt] -= 1
            if not self._uses[prompt]:
                del self._read[prompt]
        if admitted:
            self._hidden = torch.cat(states)
        return admitted

    @torch.no_grad()
    def logits(self) -> Float[Tensor, "B V"]:
        """As `practicum.ports.Reading` says."""
        assert self._hidden is not None, "a text is admitted before it is read on"
        return self._work.prepared.head.logits(self._hidden)

    @torch.no_grad()
    def advance(self, tokens: Int[Tensor, " B"], keep: Sequence[int]) -> None:
        """As `practicum.ports.Reading` says."""
        device = self._work.device
        for row, source in enumerate(keep):
            if row != source:
                self._move_slot(source, row)
        self._lengths = [self._lengths[source] for source in keep]
        self._hidden = None
        if not keep:
            return
        at = torch.tensor(self._lengths, device=device)
        self._at = (
            torch.arange(len(keep), device=device),
            at,
            max(self._lengths) + 1,
            self._mask(at),
        )
        with self._work.weights() as model:
            self._hidden = model.forward_packed(tokens.to(device)[list(keep)], at, self)
        self._lengths = [length + 1 for length in self._lengths]

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "B H d"],
        key: Float[Tensor, "B G d"],
        value: Float[Tensor, "B G e"],
        scale: float | None,
        dropout: float,
    ) -> Float[Tensor, "B H e"]:
        """One token a row over the row's own text."""
        assert self._at is not None, "rows attend while they advance"
        rows, at, reach, mask = self._at
        keys, values = self._keys[layer], self._values[layer]
        keys[rows, :, at] = key
        values[rows, :, at] = value
        grouped = query.unflatten(1, (key.shape[1], -1))
        seen = slice(0, len(rows)), slice(None), slice(0, reach)
        return attend(grouped, keys[seen], values[seen], mask, scale).flatten(1, 2)

    def _mask(self, at: Int[Tensor, " B"]) -> Float[Tensor, "B 1 1 M"] | None:
        if len(set(self._lengths)) == 1:
            return None
        behind = torch.arange(max(self._lengths) + 1, device=at.device)[None] > at[:, None]
        dtype = next(iter(self._keys.values())).dtype
        return torch.zeros(behind.shape, device=at.device, dtype=dtype).masked_fill_(
            behind, -torch.inf
        )[:, None, None]

    def _prefill_waiting(self) -> None:
        """Read waiting prompts, each once, up to a number of tokens and no more of them than there are rows."""
        chosen: dict[Prompt, None] = {}
        tokens = 0
        for prompt in self._work.prompts[self._next :]:
            if prompt in self._read or prompt in chosen:
                continue
            if chosen and (
                tokens + len(prompt) > MAX_PREFILL_TOKENS or len(chosen) == self._work.rows
            ):
                break
            chosen[prompt] = None
            tokens += len(prompt)
        # Any one token stands for the answer: it is what the prompt's last hidden state predicts, and is not read.
        packing = PackedBatch(
            [ScoreRequest(prompt, (0,)) for prompt in chosen], self._work.device, keep=True
        )
        assert packing.kept is not None
        with self._work.weights() as model:
            hidden = model.forward_packed(packing.ids, packing.positions, packing)[packing.wanted]
        for prompt, places, last in zip(chosen, packing.places(), hidden, strict=True):
            self._read[prompt] = _PrefilledPrompt(
                packing.kept, torch.tensor(places, device=hidden.device), last
            )

    def _copy_to_slot(self, row: int, prompt: _PrefilledPrompt) -> None:
        """Copy what was kept of a prompt into a slot."""
        for layer, kept in prompt.kept.items():
            for store, part in zip((self._keys, self._values), kept, strict=True):
                if layer not in store:
                    store[layer] = part.new_zeros(
                        self._work.rows, part.shape[1], self._work.longest, part.shape[2]
                    )
                store[layer][row, :, : len(prompt.places)] = part[prompt.places].transpose(0, 1)

    def _move_slot(self, source: int, row: int) -> None:
        length = self._lengths[source]
        for store in (self._keys, self._values):
            for stored in store.values():
                stored[row, :, :length] = stored[source, :, :length]


class PaddedDecodeBatch:
    """Texts that begin together, padded at the left; see `practicum.ports.Reading`."""

    refills = False

    def __init__(self, work: DecodeJob) -> None:
        self._work = work
        self._next = 0
        self._state: _PaddedState | None = None

    @torch.no_grad()
    def admit(self, most: int) -> int:
        """As `practicum.ports.Reading` says."""
        prompts = self._work.prompts[self._next : self._next + min(most, self._work.rows)]
        if not prompts:
            return 0
        different = list(dict.fromkeys(prompts))
        with self._work.weights() as model:
            state = _prefill(model, different)
        rows = torch.tensor(
            [different.index(prompt) for prompt in prompts], device=self._work.device
        )
        self._state = _select(state, rows)
        self._next += len(prompts)
        return len(prompts)

    @torch.no_grad()
    def logits(self) -> Float[Tensor, "B V"]:
        """As `practicum.ports.Reading` says."""
        assert self._state is not None, "a text is admitted before it is read on"
        return self._work.prepared.head.logits(self._state.last_hidden)

    @torch.no_grad()
    def advance(self, tokens: Int[Tensor, " B"], keep: Sequence[int]) -> None:
        """As `practicum.ports.Reading` says."""
        assert self._state is not None, "a text is admitted before it is read on"
        tokens = tokens.to(self._work.device)
        if not keep:
            self._state = None
            return
        rows = torch.tensor(keep, device=tokens.device)
        state = (
            self._state if list(keep) == list(range(len(tokens))) else _select(self._state, rows)
        )
        mask = torch.cat([state.mask, state.mask.new_ones(len(keep), 1)], dim=1)
        with self._work.weights() as model:
            hidden, cache = model.body_after(state.cache, tokens[rows][:, None], mask)
        self._state = _PaddedState(cache, mask, hidden[:, -1])


@dataclass(slots=True)
class _PaddedState:
    """A batch of prompts that the body has read: its cache, its mask, and each prompt's last hidden state."""

    cache: Cache
    mask: Bool[Tensor, "B M"]
    last_hidden: Float[Tensor, "B D"]


def _prefill(language_model: LanguageModel, prompts: Sequence[Prompt]) -> _PaddedState:
    """Read the prompts, a long common beginning only once where every layer keeps every token of it."""
    every = language_model.window is None and not language_model.recurrent
    shared = common_beginning(prompts) if every else 0
    ids, mask = pad_sequences(
        [prompt[shared:] for prompt in prompts], side="left", device=language_model.device
    )
    cache = None
    if shared:
        first, whole = pad_sequences(
            [prompts[0][:shared]], side="left", device=language_model.device
        )
        _, cache = language_model.body_after(None, first, whole)
        _select_rows(cache, ids.new_zeros(len(prompts)))
        mask = torch.cat([mask.new_ones(len(prompts), shared), mask], dim=1)
    hidden, cache = language_model.body_after(cache, ids, mask)
    return _PaddedState(cache, mask, hidden[:, -1])


def _select(state: _PaddedState, rows: Int[Tensor, " b"]) -> _PaddedState:
    _select_rows(state.cache, rows)
    return _PaddedState(state.cache, state.mask[rows], state.last_hidden[rows])


def _select_rows(cache: Cache, rows: Int[Tensor, " b"]) -> None:
    """Let the cache hold these of its rows, each as often as it is named.

    transformers' beam search does that for every kind of layer: keys and values, convolutions, recurrent states.
    """
    cache.reorder_cache(rows)  # type: ignore[arg-type]
