"""Run one decode step for texts in slots: store keys and values, and read the next tokens.

`SlotStep` runs any model that can be packed, through transformers' own modules.
`practicum.backends.local.native.NativeStep` runs some models as one compiled program.
"""

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from practicum.backends.local.attention import LayerStates, attend
from practicum.backends.local.cached_texts import CachedTexts
from practicum.backends.local.language_model import LanguageModel, record_layers
from practicum.backends.local.prepared import PrepackedModel
from practicum.backends.local.text_states import StateRecorder
from practicum.types import Sample

PromptTokens = tuple[int, ...]
Steps = Generator[None, None, list[Sample]]
"""A running sampling call; it yields between tokens and prefills, and returns the completions."""


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """The model, weights, prompts and limits of a decode batch.

    At most `rows` texts decode at a time, each with at most `longest` tokens. With `kept`, a prompt
    that starts with a kept text is only read from its end on, and texts that end are kept.
    `recorder` keeps the states of full texts for later passes. `layers` are the numbers of layers
    after which a drafter reads the states, and up to `tokens_per_read` tokens are read at a time.
    """

    language_model: LanguageModel
    overlay: Mapping[str, Tensor]
    prepacked: PrepackedModel
    prompts: Sequence[PromptTokens]
    rows: int
    longest: int
    kept: CachedTexts | None = None
    recorder: StateRecorder | None = None
    layers: tuple[int, ...] = ()
    tokens_per_read: int = 1

    @property
    def captured(self) -> tuple[int, ...]:
        """The numbers of layers after which states are captured."""
        count = 0 if self.recorder is None else self.recorder.recording.lower_layers
        return self.layers or ((count,) if count else ())

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.language_model.device

    @contextlib.contextmanager
    def weights(self) -> Iterator[LanguageModel]:
        """Yield the model, which computes with the prepacked overlay within the block."""
        with self.language_model.weights(self.overlay), self.prepacked.use():
            yield self.language_model


@dataclass(frozen=True, slots=True)
class TokenTree:
    """N tokens that follow each of B texts: one after another, or as a tree, parents first.

    A token's position is `depths` after the end of its text. It attends to the text and to the tokens
    that it `sees`: itself and those above it.
    """

    depths: Int[Tensor, " N"]
    sees: Bool[Tensor, "B N N"]

    def list_branches(self) -> Int[Tensor, "B N K"]:
        """Return the numbers of the tokens that each token sees, in order, then a filler."""
        count = len(self.depths)
        numbers = torch.where(self.sees, torch.arange(count), count).sort(dim=-1).values
        return numbers[..., : int(self.depths.max()) + 1].contiguous()


class StepProgram(Protocol):
    """The keys and values of texts in slots, and the step that reads the next tokens of each text.

    Row r of a step is the text in slot r, and the rows have no gaps. `lower` are the newest step's
    states after the job's `captured` layers next to each other, None without such layers.
    """

    lower: Float[Tensor, "B N F"] | None

    def store_prompt(
        self, slot: int, states: Mapping[int, LayerStates], indices: Int[Tensor, " L"]
    ) -> None:
        """Put a prompt's keys and values into a slot; `indices` selects its tokens in `states`."""
        ...

    def move_slot(self, source: int, slot: int, length: int) -> None:
        """Copy a text of `length` tokens to another slot."""
        ...

    def read_slot(self, slot: int, length: int) -> dict[int, LayerStates]:
        """Return a copy of the keys and values of a text of `length` tokens, by layer."""
        ...

    def move_places(self, slot: int, length: int, nodes: Sequence[int]) -> None:
        """Put the keys and values of the tokens `nodes` of a tree next to a text of `length`."""
        ...

    def read(
        self, tokens: Int[Tensor, "B N"], lengths: Sequence[int], tree: TokenTree | None = None
    ) -> Float[Tensor, "B N D"]:
        """Read tokens after texts of these lengths: one per text, or with a `tree` several.

        Returns the hidden states that predict the next tokens.
        """
        ...

    def logits(self, hidden: Float[Tensor, "B D"]) -> Float[Tensor, "B V"]:
        """Return the logits of the next tokens, without a gradient."""
        ...


def copy_heads(stores: Sequence[Float[Tensor, "R G M d"]], slot: int, length: int) -> LayerStates:
    """Return a copy of the first keys and values in a slot of a layer."""
    # A copy, because the slot's next text overwrites it.
    keys, values = (
        store[slot, :, :length].transpose(0, 1).clone(memory_format=torch.contiguous_format)
        for store in stores
    )
    return keys, values


@dataclass(frozen=True, slots=True)
class _DecodeStep:
    """The layout of one decode step: each row's slots, the new tokens' places and visible keys.

    `reach` is the number of leading places that any token sees; `mask` hides the rest of them.
    """

    slots: Int[Tensor, "B 1"]
    places: Int[Tensor, "B N"]
    reach: int
    mask: Float[Tensor, "B 1 N M"] | None


class SlotStep:
    """The step through transformers' modules; see `StepProgram`.

    The object implements `practicum.backends.local.attention.AttentionLayout` for its steps.
    """

    def __init__(self, job: DecodeJob) -> None:
        self._job = job
        self.lower: Float[Tensor, "B N F"] | None = None
        # Keys and values by layer: [R, G, M, d] and [R, G, M, e].
        self._stores: dict[int, list[Tensor]] = {}
        self._step: _DecodeStep | None = None

    def store_prompt(
        self, slot: int, states: Mapping[int, LayerStates], indices: Int[Tensor, " L"]
    ) -> None:
        """Put a prompt into a slot; the first call allocates the store."""
        for layer, tensors in states.items():
            if layer not in self._stores:
                rows, longest = self._job.rows, self._job.longest
                self._stores[layer] = [
                    heads.new_zeros(rows, heads.shape[1], longest, heads.shape[2])
                    for heads in tensors
                ]
            for stored, heads in zip(self._stores[layer], tensors, strict=True):
                stored[slot, :, : len(indices)] = heads[indices].transpose(0, 1)

    def move_slot(self, source: int, slot: int, length: int) -> None:
        """Copy a text of `length` tokens to another slot."""
        for stored in chain.from_iterable(self._stores.values()):
            stored[slot, :, :length] = stored[source, :, :length]

    def read_slot(self, slot: int, length: int) -> dict[int, LayerStates]:
        """Return a copy of a text's keys and values by layer."""
        return {layer: copy_heads(stores, slot, length) for layer, stores in self._stores.items()}

    def move_places(self, slot: int, length: int, nodes: Sequence[int]) -> None:
        """Put the keys and values of some tokens next to a text."""
        for stored in chain.from_iterable(self._stores.values()):
            stored[slot, :, length : length + len(nodes)] = stored[
                slot, :, [length + node for node in nodes]
            ]

    def read(
        self, tokens: Int[Tensor, "B N"], lengths: Sequence[int], tree: TokenTree | None = None
    ) -> Float[Tensor, "B N D"]:
        """Read tokens after texts; return the hidden states that predict the next ones."""
        device, (batch, count) = self._job.device, tokens.shape
        ends = torch.tensor(lengths, device=device)[:, None]
        places = ends + torch.arange(count, device=device)
        self._step = _DecodeStep(
            slots=torch.arange(batch, device=device)[:, None],
            places=places,
            reach=max(lengths) + count,
            mask=self._build_mask(ends, lengths, tree),
        )
        positions = (places if tree is None else ends + tree.depths.to(device)).flatten()
        with self._job.weights() as model, record_layers(model, self._job.captured) as states:
            hidden = model.forward_packed(tokens.flatten(), positions, self)
        self.lower = torch.cat(states, dim=-1).view(batch, count, -1) if states else None
        return hidden.view(batch, count, -1)

    def logits(self, hidden: Float[Tensor, "B D"]) -> Float[Tensor, "B V"]:
        """Return the logits of the next tokens, computed with the prepacked head."""
        return self._job.prepacked.head.logits(hidden)

    def attend(
        self,
        layer: int,
        queries: Float[Tensor, "T H d"],
        keys: Float[Tensor, "T G d"],
        values: Float[Tensor, "T G e"],
        scale: float | None,
        dropout: float,
    ) -> Float[Tensor, "T H e"]:
        """Store the new keys and values of each row, and attend over the row's own text."""
        assert self._step is not None, "rows attend while they are read"
        step = self._step
        stored_keys, stored_values = self._stores[layer]
        stored_keys[step.slots, :, step.places] = keys.unflatten(0, step.places.shape)
        stored_values[step.slots, :, step.places] = values.unflatten(0, step.places.shape)
        # The query heads of one group share a key, so pass them as several queries of one head: the
        # attention kernel then reads every key once.
        (batch, count), groups = step.places.shape, keys.shape[1]
        repeats, mask = queries.shape[1] // groups, step.mask
        grouped = queries.view(batch, count, groups, repeats, -1).transpose(1, 2).flatten(2, 3)
        if mask is not None and count > 1:
            mask = mask.repeat_interleave(repeats, dim=2)
        visible = slice(0, batch), slice(None), slice(0, step.reach)
        output = attend(grouped, stored_keys[visible], stored_values[visible], mask, scale)
        by_token = output.view(batch, groups, count, repeats, -1).transpose(1, 2)
        return by_token.reshape(batch * count, groups * repeats, -1)

    def _build_mask(
        self, ends: Int[Tensor, "B 1"], lengths: Sequence[int], tree: TokenTree | None
    ) -> Float[Tensor, "B 1 N M"] | None:
        """Return the mask of places that a token does not see; None if it hides nothing."""
        if tree is None and len(set(lengths)) == 1:
            return None
        count = 1 if tree is None else len(tree.depths)
        numbers = torch.arange(max(lengths) + count, device=ends.device) - ends
        hidden = (numbers > 0)[:, None]
        if tree is not None:
            sees = torch.nn.functional.pad(tree.sees.to(ends.device), (1, 1))
            sees[..., 0] = True  # the text
            hidden = ~sees.gather(
                2, (numbers + 1).clamp(0, count + 1)[:, None].expand(-1, count, -1)
            )
        dtype = next(iter(self._stores.values()))[0].dtype
        mask = torch.zeros(hidden.shape, device=ends.device, dtype=dtype)
        return mask.masked_fill_(hidden, -torch.inf)[:, None]
