"""Arrange the weights of a Llama-like body for one token per row: few products, one dtype."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.llama_weights import (
    DOWN,
    HEAD_NORMS,
    UP,
    LlamaWeights,
    find_llama_weights,
)

QUERY_NORM, KEY_NORM = (f"{name}.weight" for name in HEAD_NORMS)


@dataclass(frozen=True, slots=True)
class StaticMap:
    """A linear map, or several with one input as one product; `down` and `up` are its adapter."""

    weight: Float[Tensor, "N K"]
    bias: Float[Tensor, " N"] | None = None
    down: Float[Tensor, "r K"] | None = None
    up: Float[Tensor, "N r"] | None = None

    def __call__(self, rows: Float[Tensor, "B K"]) -> Float[Tensor, "B N"]:
        product = linear(rows, self.weight, self.bias)
        if self.down is None or self.up is None:
            return product
        return product + linear(linear(rows, self.down), self.up)


@dataclass(frozen=True, slots=True)
class StaticLayer:
    """A layer; queries, keys and values are one map, and so are gate and up projection."""

    input_norm: Float[Tensor, " D"]
    qkv: StaticMap
    query_norm: Float[Tensor, " d"] | None
    key_norm: Float[Tensor, " d"] | None
    output: StaticMap
    inner_norm: Float[Tensor, " D"]
    gate_up: StaticMap
    down: StaticMap


@dataclass(frozen=True, slots=True)
class StaticWeights:
    """The weights of a body for the static step; maps are in `dtype`, hidden states in `wide`.

    The model's own modules compute in the same dtypes, with or without autocast.
    """

    llama: LlamaWeights
    layers: Sequence[StaticLayer]
    dtype: torch.dtype

    @property
    def wide(self) -> torch.dtype:
        """The dtype of the hidden states between the layers."""
        return self.llama.embedding.dtype


@torch.no_grad()
def pack_weights(language_model: LanguageModel) -> StaticWeights | None:
    """Return a copy of the model's current maps, or None if it is not Llama-like.

    Adapters stay separate from their weights: a small adapter would be lost if it were added to a
    weight in bfloat16.
    """
    llama = find_llama_weights(language_model.model, merge=False)
    if llama is None:
        return None
    dtype = torch.bfloat16 if language_model.autocast else llama.embedding.dtype
    layers = [_pack_layer(layer, llama.embedding.dtype, dtype) for layer in llama.layers]
    return StaticWeights(llama, layers, dtype)


def _pack_layer(layer: Mapping[str, Tensor], wide: torch.dtype, dtype: torch.dtype) -> StaticLayer:
    def widen(name: str) -> Tensor:
        # A trained norm is float32 even in bfloat16 layers, and is computed in float32.
        return layer[name].to(torch.promote_types(wide, layer[name].dtype))

    def join(part: str, *names: str) -> StaticMap:
        return _join_maps(layer, [f"{part}.{name}_proj" for name in names], dtype)

    return StaticLayer(
        input_norm=widen("input_layernorm.weight"),
        qkv=join("self_attn", "q", "k", "v"),
        query_norm=widen(QUERY_NORM) if QUERY_NORM in layer else None,
        key_norm=widen(KEY_NORM) if KEY_NORM in layer else None,
        output=join("self_attn", "o"),
        inner_norm=widen("post_attention_layernorm.weight"),
        gate_up=join("mlp", "gate", "up"),
        down=join("mlp", "down"),
    )


def _join_maps(layer: Mapping[str, Tensor], names: Sequence[str], dtype: torch.dtype) -> StaticMap:
    """Join maps with the same input into one map with concatenated outputs."""
    weights = [layer[f"{name}.weight"].to(dtype) for name in names]
    bias = None
    if any(f"{name}.bias" in layer for name in names):
        zeros = (weight.new_zeros(len(weight)) for weight in weights)
        pairs = zip(names, zeros, strict=True)
        bias = torch.cat([layer.get(f"{name}.bias", zero).to(dtype) for name, zero in pairs])
    adapted = [name for name in names if f"{name}.{DOWN}" in layer]
    joined = StaticMap(torch.cat(weights) if len(weights) > 1 else weights[0], bias)
    if not adapted:
        return joined
    down = torch.cat([layer[f"{name}.{DOWN}"].to(dtype) for name in adapted])
    # Each adapter only affects the outputs of its own map.
    ups = [
        layer[f"{name}.{UP}"].to(dtype) if name in adapted else weight.new_zeros(len(weight), 0)
        for name, weight in zip(names, weights, strict=True)
    ]
    return StaticMap(joined.weight, bias, down, torch.block_diag(*ups))
