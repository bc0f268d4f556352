"""Measure the memory of a backward pass, and plan micro-batches that fit in a budget.

The activations that autograd saves in the student's body grow with the tokens of a micro-batch. A
short forward pass measures the bytes per token. They determine how many tokens fit in a given
memory, and whether layers must be recomputed in the backward pass (activation checkpointing, arXiv
1604.06174). The plan does not depend on the memory that is currently free.
"""

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint

from practicum.backends.local.language_model import LanguageModel, find_layers, patch_forwards
from practicum.backends.local.packing import compute_hidden_states
from practicum.backends.local.quantising import is_packed
from practicum.costs import GraphPlan
from practicum.types import ScoreRequest

PROBE_TOKENS = 96
"""The tokens of the measured text. A third of it is also measured, so that fixed costs cancel."""

MAX_CPU_TOKENS = 1024
"""The largest useful micro-batch on a CPU: beyond it, activations no longer fit in the caches."""


def plan_micro_batch(
    language_model: LanguageModel,
    bytes_a_token: int,
    longest: int,
    budget: int,
    most: int | None = None,
) -> GraphPlan:
    """Plan the largest micro-batch with activations that fit in `budget` bytes.

    It holds at least the `longest` text, in tokens; layers are recomputed if that text does not
    fit. `most` is the largest useful one (None: the device's).
    """
    if most is None:
        most = MAX_CPU_TOKENS if language_model.device.type == "cpu" else sys.maxsize
    fitting = budget // bytes_a_token
    layers = len(find_layers(language_model.model) or ())
    recompute = fitting < longest and layers >= 2
    if recompute:
        # With recomputation, every layer saves only its input, and only one layer's activations
        # exist at a time.
        config = language_model.model.config.get_text_config()
        input_bytes = config.hidden_size * language_model.model.dtype.itemsize
        fitting = budget // (layers * input_bytes + bytes_a_token // layers)
    return GraphPlan(max(min(fitting, most), longest), recompute=recompute)


def measure_activation_bytes(language_model: LanguageModel) -> int:
    """Measure the activation memory of one token of the body, in bytes."""
    longest = min(PROBE_TOKENS, language_model.context_length)
    short = max(longest // 3, 1)
    with torch.enable_grad():
        difference = _measure_saved_bytes(language_model, longest)
        difference -= _measure_saved_bytes(language_model, short)
    return max(difference // max(longest - short, 1), 1)


def activation_checkpointing(
    language_model: LanguageModel, enabled: bool
) -> AbstractContextManager[None]:
    """Within the block, save only the layers' inputs and recompute the layers in backward."""
    layers = find_layers(language_model.model) or () if enabled else ()
    return patch_forwards(
        {layer: partial(checkpoint, layer.forward, use_reentrant=False) for layer in layers}
    )


def _measure_saved_bytes(language_model: LanguageModel, tokens: int) -> int:
    """Return the bytes that autograd saves for one text of `tokens` tokens, without the weights."""
    weights = _find_addresses(language_model.model.parameters())
    layers = find_layers(language_model.model) or ()
    owners = {part: layer for layer in layers for part in layer.modules() if part is not layer}
    current: torch.nn.Module = language_model.model
    saved: dict[int, int] = {}
    # Storages are identified by address, so no storage may be freed and reused during the
    # measurement.
    aliases: list[Tensor] = []

    def look(module: torch.nn.Module, _: object) -> None:
        nonlocal current
        current = owners.get(module, module)

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        # A sharded model gathers a layer's weights before it computes, and frees them afterwards.
        if address not in weights and address not in _find_addresses(current.parameters()):
            saved[address] = storage.nbytes()
        # Detached: a graph that held its own outputs would never be freed.
        aliases.append(tensor.detach())
        return aliases[-1]

    text = ScoreRequest((0,), (0,) * tokens)
    with (
        register_module_forward_pre_hook(look),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        compute_hidden_states(language_model, [text])
    return sum(saved.values())


def _find_addresses(parameters: Iterable[torch.nn.Parameter]) -> set[int]:
    """Return the addresses of weights; of a sharded weight, the address of this rank's rows."""
    # A packed weight is an attribute of its product and never saved.
    stored = (p for p in parameters if not is_packed(p))
    local = (p.to_local() if isinstance(p, DTensor) else p for p in stored)
    return {weight.untyped_storage().data_ptr() for weight in local}
