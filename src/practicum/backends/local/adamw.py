"""Take a step of AdamW with the settings of a training step, and check its saved state."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from practicum.errors import CheckpointError
from practicum.ports import AdamParams


def take_step(optimizer: torch.optim.AdamW, params: AdamParams) -> None:
    """Take one step along the accumulated gradients; the caller has clipped them."""
    for group in optimizer.param_groups:
        # Weights in addition to the model's may have a separate relative learning rate (`pace`).
        group.update(
            lr=params.learning_rate * group.get("pace", 1.0),
            betas=params.betas,
            eps=params.epsilon,
            weight_decay=params.weight_decay,
        )
    optimizer.step()
    # The fused step does not raise the versions of the weights, and caches compare these versions.
    for group in optimizer.param_groups:
        increment_version(group["params"])


def check_state(parameters: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Raise CheckpointError if saved weights or moments belong to another model."""
    expected = {name: parameter.shape for name, parameter in parameters.items()}
    saved = {name: tensor.shape for name, tensor in tensors["student"].items()}
    moments = {key.rsplit("/", 1)[0] for key in tensors["optimizer"]}
    differing = sorted(
        {name for name, _ in expected.items() ^ saved.items()} | (moments - expected.keys())
    )
    if differing:
        raise CheckpointError(
            f"the state does not fit the student: {len(differing)} weights differ in name or "
            f"shape (first: {differing[0]}); resume with the model, lora and trainable_layers "
            "that the state was saved with"
        )
