"""Keep a rank that runs out of memory in step with the other ranks' collectives."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from practicum.backends.local.language_model import LanguageModel, find_layers

NoteFailure = Callable[[RuntimeError], None]
"""A function that records an out-of-memory error, and raises any other error."""


@contextmanager
def guard_layers(language_model: LanguageModel, note_failure: NoteFailure) -> Iterator[None]:
    """Within the block, let a layer that runs out of memory return its input as its output.

    The values are wrong and must not be used. FSDP gathers a layer before its `forward` and sums
    its gradients when the backward pass reaches its weights, so the output depends on all of them.
    """
    layers = find_layers(language_model.model) or ()
    # Activation checkpointing may have replaced a layer's forward already.
    replaced = {layer: layer.__dict__.get("forward") for layer in layers}
    try:
        for layer in layers:
            layer.__dict__["forward"] = partial(_forward_layer, layer, layer.forward, note_failure)
        yield
    finally:
        for layer, forward in replaced.items():
            layer.__dict__.pop("forward")
            if forward is not None:
                layer.__dict__["forward"] = forward


def _forward_layer(
    layer: torch.nn.Module,
    forward: Callable[..., Any],
    note_failure: NoteFailure,
    hidden: Tensor,
    *arguments: Any,
    **named: Any,
) -> Any:
    try:
        return forward(hidden, *arguments, **named)
    except RuntimeError as error:
        note_failure(error)
    weights = [weight for weight in layer.parameters() if weight.requires_grad]
    # One entry of each weight is enough for autograd to reach it, and takes no memory.
    return hidden + sum((0 * weight.flatten()[0] for weight in weights), hidden.new_zeros(()))
