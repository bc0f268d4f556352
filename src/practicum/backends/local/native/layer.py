"""Compute norms, rotations and gates of Llama-like layers over a packed row, in compiled code."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from practicum.backends.local.attention import AttentionLayout
from practicum.backends.local.language_model import LanguageModel, find_layers, patch_forwards
from practicum.backends.local.llama_weights import find_llama_weights
from practicum.backends.local.native.library import NativeLibrary


def use_native_layers(
    library: NativeLibrary | None, language_model: LanguageModel
) -> AbstractContextManager[None]:
    """Use the program, if any, for all but the matrix products of packed passes in the block.

    The model must be one that decodes with the program: a trial has shown what its layers compute.
    """
    model = language_model.model
    # Only the modules can compute dropout.
    epsilon = None if library is None or model.training else _find_epsilon(model)
    if library is None or epsilon is None:
        return nullcontext()
    forwards: dict[torch.nn.Module, Callable[..., Tensor]] = {}
    for number, layer in enumerate(find_layers(model) or ()):
        read = _Layer(library, number, dict(layer.named_modules()), epsilon).read
        wrapped = _wrap_alike(layer.forward, MethodType(type(layer).forward, layer), read)
        # Do not replace any other function that was put in place of the layer's own.
        if wrapped is not None:
            forwards[layer] = wrapped
    return patch_forwards(forwards)


def _wrap_alike(
    wrapper: Callable[..., Tensor], method: MethodType, replacement: Callable[..., Tensor]
) -> Callable[..., Tensor] | None:
    """Wrap the replacement in the same partial calls as the method; None for any other wrapper."""
    if wrapper == method:
        return replacement
    if not isinstance(wrapper, partial):
        return None
    wrapped = [
        _wrap_alike(part, method, replacement) if isinstance(part, partial | MethodType) else None
        for part in wrapper.args
    ]
    if not any(wrapped):
        return None
    parts = [new or part for part, new in zip(wrapper.args, wrapped, strict=True)]
    return partial(wrapper.func, *parts, **wrapper.keywords)


def _find_epsilon(model: PreTrainedModel) -> float | None:
    """Return the epsilon of the norms of a Llama-like model; None for any other model."""
    if model not in _EPSILONS:
        weights = find_llama_weights(model, merge=False)
        _EPSILONS[model] = weights and weights.epsilon
    return _EPSILONS[model]


_EPSILONS: WeakKeyDictionary[PreTrainedModel, float | None] = WeakKeyDictionary()
"""The cached results of `_find_epsilon`, which takes milliseconds to read all names."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer: its number, its modules by name, and the epsilon of its norms."""

    library: NativeLibrary
    number: int
    modules: dict[str, torch.nn.Module]
    epsilon: float

    def read(
        self,
        states: Float[Tensor, "1 T D"],
        *,
        position_embeddings: tuple[Tensor, Tensor],
        layout: AttentionLayout,
        **_: Any,  # transformers passes arguments that other layers need
    ) -> Float[Tensor, "1 T D"]:
        """Return the states after the layer."""
        modules = self.modules
        normed = self._normalize(states[0], "input_layernorm")
        cosines, sines = (angles[0].contiguous() for angles in position_embeddings)
        width = cosines.shape[1]
        queries, keys, values = (
            modules[f"self_attn.{name}_proj"](normed).unflatten(1, (-1, width)) for name in "qkv"
        )
        queries, keys = (
            _Rotation.apply(self._normalize(heads, f"self_attn.{name}_norm"), cosines, sines, self)
            for name, heads in (("q", queries), ("k", keys))
        )
        attended = layout.attend(self.number, queries, keys, values, None, 0.0).flatten(1)
        states = states[0] + modules["self_attn.o_proj"](attended)
        normed = self._normalize(states, "post_attention_layernorm")
        gates, ups = modules["mlp.gate_proj"](normed), modules["mlp.up_proj"](normed)
        # Return a sum, not a view of a sum: FSDP attaches hooks to the output of a layer.
        return states[None] + modules["mlp.down_proj"](_Gate.apply(gates, ups, self))

    def _normalize(self, states: Tensor, name: str) -> Tensor:
        """Normalize states; return them unchanged if the layer has no norm of this name."""
        norm = self.modules.get(name)
        return states if norm is None else _Norm.apply(states, *norm.parameters(), self)


class _Norm(torch.autograd.Function):
    """The root mean square norm of the last axis."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, states: Tensor, weight: Tensor, layer: _Layer
    ) -> Tensor:
        states, weight = states.contiguous(), weight.detach()
        scales, out = states.new_empty(states.shape[:-1]), torch.empty_like(states)
        sizes = scales.numel(), len(weight)
        layer.library.call("normalize_rows", states, weight, out, scales, *sizes, layer.epsilon)
        ctx.save_for_backward(states, weight, scales)
        ctx.layer, ctx.sizes = layer, sizes
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        states, weight, scales = ctx.saved_tensors
        of_states = torch.empty_like(states)
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        tensors = states, weight, gradient.contiguous(), scales, of_states, of_weight
        ctx.layer.library.call("differentiate_norms", *tensors, *ctx.sizes)
        return of_states, of_weight, None


class _Gate(torch.autograd.Function):
    """`silu(gates) * ups`."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, ups: Tensor, layer: _Layer) -> Tensor:  # type: ignore[override]
        gates, ups = gates.contiguous(), ups.contiguous()
        out = torch.empty_like(gates)
        layer.library.call("gate_numbers", gates, ups, out, gates.numel())
        ctx.save_for_backward(gates, ups)
        ctx.layer = layer
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gates, ups = ctx.saved_tensors
        of_gates, of_ups = torch.empty_like(gates), torch.empty_like(ups)
        tensors = gates, ups, gradient.contiguous(), of_gates, of_ups
        ctx.layer.library.call("differentiate_gates", *tensors, gates.numel())
        return of_gates, of_ups, None


class _Rotation(torch.autograd.Function):
    """The rotation of the two halves of each head by its token's angles."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, heads: Tensor, cosines: Tensor, sines: Tensor, layer: _Layer
    ) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        ctx.layer = layer
        return _rotate(layer, heads, cosines, sines, 1.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cosines, sines = ctx.saved_tensors
        return _rotate(ctx.layer, gradient, cosines, sines, -1.0), None, None, None


def _rotate(
    layer: _Layer, heads: Tensor, cosines: Tensor, sines: Tensor, direction: float
) -> Tensor:
    heads = heads.contiguous()
    out = torch.empty_like(heads)
    layer.library.call("rotate_heads", heads, cosines, sines, out, *heads.shape, direction)
    return out
