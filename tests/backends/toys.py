"""Data over the fifteen tokens of a from-scratch folder."""

from dataclasses import replace

import torch

from practicum.backends.local.loading import load
from practicum.models.config import ModelConfig

from .folders import TOKENS
from .tiny import data_for, rollout


def toy_data(folder):
    """Return three rollouts, with slightly perturbed scores of the folder's model."""
    items = [rollout(4, 6, seed) for seed in range(3)]
    items = [
        replace(
            item,
            prompt_tokens=tuple(token % TOKENS for token in item.prompt_tokens),
            tokens=item.tokens % TOKENS,
        )
        for item in items
    ]
    data = data_for(load(ModelConfig(model=str(folder))).language_model, items)
    for number, datum in enumerate(data):
        noise = torch.randn(
            datum.signal.hidden.shape, generator=torch.Generator().manual_seed(number)
        )
        datum.signal.hidden.add_(noise)
    return data
