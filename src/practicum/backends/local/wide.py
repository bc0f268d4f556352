"""Compute a float32 model's layers in float64, to find out whether a difference is rounding."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_map

from practicum.backends.local.decode_step import PromptTokens
from practicum.backends.local.language_model import LanguageModel, find_layers, patch_forwards
from practicum.backends.local.packing import pad_sequences


def compute_by_forward(
    language_model: LanguageModel, texts: Sequence[PromptTokens]
) -> Float[Tensor, "B L V"]:
    """Return the log-probabilities after each token of some texts, without decoding."""
    ids, mask = pad_sequences(texts, side="right", device=language_model.device)
    hidden = language_model.body(ids, mask)
    return language_model.head().logprobs(hidden.to(language_model.model.dtype))


def compute_in_float64(
    language_model: LanguageModel, texts: Sequence[PromptTokens]
) -> Float[Tensor, "B L V"]:
    """Return the same log-probabilities with the layers in float64 and the head in float32.

    One layer at a time is copied, so this takes the memory of three layers.
    """
    layers = find_layers(language_model.model) or ()
    with patch_forwards({layer: _widen(layer) for layer in layers}):
        return compute_by_forward(language_model, texts)


def _widen(layer: torch.nn.Module) -> Callable[..., Any]:
    def forward(*arguments: Any, **keywords: Any) -> Any:
        wide = copy.deepcopy(layer)
        # The copy has this function instead of its own.
        del wide.__dict__["forward"]
        wide = wide.double()
        # Its hooks run around the layer itself.
        return wide.forward(*tree_map(_to_float64, arguments), **tree_map(_to_float64, keywords))

    return forward


def _to_float64(entry: Any) -> Any:
    is_float = isinstance(entry, Tensor) and entry.is_floating_point()
    return entry.double() if is_float else entry
