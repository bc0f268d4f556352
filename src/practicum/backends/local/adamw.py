"""A step of AdamW with the settings that a training step hands over."""

import torch
from torch.autograd.graph import increment_version

from practicum.ports import AdamParams


def take_step(optimizer: torch.optim.AdamW, params: AdamParams) -> None:
    """Take one step along the gradients that are there; clipping is the caller's."""
    for group in optimizer.param_groups:
        group.update(
            lr=params.learning_rate,
            betas=params.betas,
            eps=params.epsilon,
            weight_decay=params.weight_decay,
        )
    optimizer.step()
    # The fused step changes weights without a word, and what is kept of weights goes by versions.
    for group in optimizer.param_groups:
        increment_version(group["params"])
