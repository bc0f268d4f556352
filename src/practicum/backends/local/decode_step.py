"""Run one decode step for texts in slots: store keys and values, and read one token per text.

`SlotStep` runs any model that can be packed, through transformers' own modules.
`practicum.backends.local.native.NativeStep` runs some models as one compiled program.
"""

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum.backends.local.attention import LayerStates, attend
from practicum.backends.local.cached_texts import CachedTexts
from practicum.backends.local.language_model import LanguageModel
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
    `recorder` keeps the states of full texts for later passes.
    """

    language_model: LanguageModel
    overlay: Mapping[str, Tensor]
    prepacked: PrepackedModel
    prompts: Sequence[PromptTokens]
    rows: int
    longest: int
    kept: CachedTexts | None = None
    recorder: StateRecorder | None = None

    @property
    def lower_layers(self) -> int:
        """The number of layers after which the recorder keeps the states, or 0."""
        return 0 if self.recorder is None else self.recorder.recording.lower_layers

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.language_model.device

    @contextlib.contextmanager
    def weights(self) -> Iterator[LanguageModel]:
        """Yield the model, which computes with the prepacked overlay within the block."""
        with self.language_model.weights(self.overlay), self.prepacked.use():
            yield self.language_model


class StepProgram(Protocol):
    """The keys and values of texts in slots, and the step that reads one token of each text.

    Row r of a step is the text in slot r, and the rows have no gaps. `lower` are the newest step's
    states after the job's `lower_layers`, None if that is 0.
    """

    lower: Float[Tensor, "B D"] | None

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

    def advance(self, tokens: Int[Tensor, " B"], lengths: Sequence[int]) -> Float[Tensor, "B D"]:
        """Append one token to each row; return the hidden states that predict the next tokens.

        `lengths` are the rows' lengths before that.
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
    """The layout of one decode step: each row's slot, next position and visible keys.

    `reach` is the number of leading positions that any row sees; `mask` hides the rest of each row.
    """

    slots: Int[Tensor, " B"]
    positions: Int[Tensor, " B"]
    reach: int
    mask: Float[Tensor, "B 1 1 M"] | None


class SlotStep:
    """The step through transformers' modules; see `StepProgram`.

    The object implements `practicum.backends.local.attention.AttentionLayout` for its steps.
    """

    def __init__(self, job: DecodeJob) -> None:
        assert not job.lower_layers, "only the compiled step keeps states between layers"
        self._job = job
        self.lower: Float[Tensor, "B D"] | None = None
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

    def advance(self, tokens: Int[Tensor, " B"], lengths: Sequence[int]) -> Float[Tensor, "B D"]:
        """Append one token to each row; return the hidden states that predict the next tokens."""
        positions = torch.tensor(lengths, device=self._job.device)
        self._step = _DecodeStep(
            slots=torch.arange(len(lengths), device=self._job.device),
            positions=positions,
            reach=max(lengths) + 1,
            mask=self._build_mask(positions, lengths),
        )
        with self._job.weights() as model:
            return model.forward_packed(tokens, positions, self)

    def logits(self, hidden: Float[Tensor, "B D"]) -> Float[Tensor, "B V"]:
        """Return the logits of the next tokens, computed with the prepacked head."""
        return self._job.prepacked.head.logits(hidden)

    def attend(
        self,
        layer: int,
        queries: Float[Tensor, "B H d"],
        keys: Float[Tensor, "B G d"],
        values: Float[Tensor, "B G e"],
        scale: float | None,
        dropout: float,
    ) -> Float[Tensor, "B H e"]:
        """Store each row's new key and value, and attend over the row's own text."""
        assert self._step is not None, "rows attend while they advance"
        step = self._step
        stored_keys, stored_values = self._stores[layer]
        stored_keys[step.slots, :, step.positions] = keys
        stored_values[step.slots, :, step.positions] = values
        # The query heads of one group share a key, so pass them as several queries of one head: the
        # attention kernel then reads every key once.
        grouped = queries.unflatten(1, (keys.shape[1], -1))
        visible = slice(0, len(step.slots)), slice(None), slice(0, step.reach)
        output = attend(grouped, stored_keys[visible], stored_values[visible], step.mask, scale)
        return output.flatten(1, 2)

    def _build_mask(
        self, positions: Int[Tensor, " B"], lengths: Sequence[int]
    ) -> Float[Tensor, "B 1 1 M"] | None:
        """Return the mask of positions after each row's end; None if all rows are equally long."""
        if len(set(lengths)) == 1:
            return None
        places = torch.arange(max(lengths) + 1, device=positions.device)
        after_end = places[None] > positions[:, None]
        dtype = next(iter(self._stores.values()))[0].dtype
        mask = torch.zeros(after_end.shape, device=positions.device, dtype=dtype)
        return mask.masked_fill_(after_end, -torch.inf)[:, None, None]
