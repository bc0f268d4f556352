"""How much memory a backward pass needs, found by trying, and what is done about it.

What autograd keeps of the student's body grows with the tokens that go through it together. A short trial says by how much a
token; from that follow how many tokens fit in a given memory, and whether the layers must be computed a second time instead
of being kept (activation checkpointing, arXiv 1604.06174). The answer does not depend on how much memory happens to be free.
"""

import sys
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from practicum.backends.local.language_model import LanguageModel, find_layers, patch_forwards
from practicum.backends.local.packing import hidden_states
from practicum.costs import GraphPlan
from practicum.types import ScoreRequest

PROBE_TOKENS = 96
"""How long the trial is; a third of it is tried too, so that what does not grow drops out."""

MAX_CPU_TOKENS = 1024
"""On a CPU more tokens than this at once are no faster each: what layers hand on no longer fits in the caches."""


def plan_micro_batch(
    language_model: LanguageModel, bytes_a_token: int, longest: int, budget: int
) -> GraphPlan:
    """The most tokens whose graph fits in `budget` bytes, but at least the `longest` text, its layers recomputed if need be."""
    enough = MAX_CPU_TOKENS if language_model.device.type == "cpu" else sys.maxsize
    kept = budget // bytes_a_token
    layers = len(find_layers(language_model.model) or ())
    if kept >= longest or layers < 2:
        return GraphPlan(max(min(kept, enough), longest), recompute=False)
    width = (
        language_model.model.config.get_text_config().hidden_size
        * language_model.model.dtype.itemsize
    )
    kept = budget // (layers * width + bytes_a_token // layers)
    return GraphPlan(max(min(kept, enough), longest), recompute=True)


def measure_activation_bytes(language_model: LanguageModel) -> int:
    """How many bytes autograd keeps of the body for each token."""
    longest = min(PROBE_TOKENS, language_model.context_length)
    short = max(longest // 3, 1)
    with torch.enable_grad():
        grown = _measure_saved_bytes(language_model, longest) - _measure_saved_bytes(
            language_model, short
        )
    return max(grown // max(longest - short, 1), 1)


def activation_checkpointing(
    language_model: LanguageModel, wanted: bool
) -> AbstractContextManager[None]:
    """Within the block, layers keep their inputs alone and are computed again in the backward pass, if that is wanted."""
    layers = find_layers(language_model.model) or () if wanted else ()
    return patch_forwards(
        {layer: partial(checkpoint, layer.forward, use_reentrant=False) for layer in layers}
    )


def _measure_saved_bytes(language_model: LanguageModel, tokens: int) -> int:
    """The bytes that the graph of one text holds, the weights not counted."""
    weights = {weight.untyped_storage().data_ptr() for weight in language_model.model.parameters()}
    held: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    text = ScoreRequest((0,), (0,) * tokens)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        # The states are held until the count is taken: what is freed meanwhile would leave its address to another.
        states = hidden_states(language_model, [text])
    del states
    return sum(held.values())
