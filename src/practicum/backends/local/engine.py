"""Connect the local student to an engine: weights by name, and a rehearsal with noisy weights."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from practicum.backends.local.adapters import merge_adapters
from practicum.backends.local.loading import LoadedModel
from practicum.backends.local.sampler import LocalSampler
from practicum.backends.local.trainer import LocalTrainer
from practicum.core.plugins import load_plugin
from practicum.core.randomness import seed_of
from practicum.engine_service.engine_trainer import (
    EngineTrainer,
    WeightKeeper,
    build_canary,
    choose_tolerance,
)
from practicum.ports import BackendContext, SamplingClient
from practicum.ports.engines import EngineChoice, EngineModel

REHEARSAL_NOISE, SMALLEST_NOISE = 0.3, 0.02
"""The noise of a rehearsal in standard deviations of each tensor, and its smallest deviation."""


def open_engine_trainer(
    trainer: LocalTrainer, loaded: LoadedModel, choice: EngineChoice, context: BackendContext
) -> EngineTrainer | None:
    """Return a trainer that samples with the recipe's engine; None if the engine declines."""
    live = trainer.build_sampling_client()
    keeper = open_keeper(loaded, choice, live)
    if keeper is None:
        return None
    context.at_end.callback(keeper.engine.close)
    return EngineTrainer(trainer, keeper, live)


def open_keeper(
    loaded: LoadedModel, choice: EngineChoice, live: LocalSampler
) -> WeightKeeper | None:
    """Start the recipe's engine with the weights of `live`; return None if the engine declines."""
    model = loaded.language_model
    dtype = torch.bfloat16 if model.autocast else model.model.dtype
    max_tokens = min(choice.max_tokens, loaded.context_length)
    engine = load_plugin("practicum.engines", choice.config.type).build(
        choice.config,
        EngineModel(
            write_config=lambda folder: write_config(loaded, folder),
            dtype=dtype,
            device=model.device,
            vocab_size=model.vocab_size,
            max_tokens=max_tokens,
        ),
    )
    if engine is None:
        return None
    return WeightKeeper(
        engine=engine,
        gather=gather_weights,
        rehearse=lambda: add_noise(live),
        canary=build_canary(model.vocab_size, max_tokens),
        tolerance=choose_tolerance(choice.config.tolerance, dtype),
    )


def write_config(loaded: LoadedModel, folder: Path) -> None:
    """Write the model's `config.json`, including the class name that other programs read."""
    model = loaded.language_model.model
    # The config of a model that was built from a config, as from-scratch models are, does not name
    # the class.
    config = type(model.config).from_dict(model.config.to_dict())
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)


@torch.no_grad()
def gather_weights(client: SamplingClient) -> dict[str, Tensor]:
    """Return all weights of a sampler by their names in a model folder, adapters merged.

    Weights without adapters are the live tensors, not copies. Tied weights are listed twice.
    """
    assert isinstance(client, LocalSampler), "an engine is given the samplers of its backend"
    with client.language_model.weights(client.overlay):
        return merge_adapters(client.language_model.model)


def add_noise(client: LocalSampler) -> LocalSampler:
    """Return a sampler over the same weights with noise on every trainable one."""
    stream = torch.Generator().manual_seed(seed_of("rehearsal"))
    overlay: Mapping[str, Tensor] = {
        name: _add_noise(weight.detach(), stream)
        for name, weight in client.language_model.trainable_parameters().items()
    }
    return replace(client, overlay=overlay)


def _add_noise(weight: Tensor, stream: torch.Generator) -> Tensor:
    """Return a copy with noise; constant tensors, such as new adapters and norms, change too."""
    scale = REHEARSAL_NOISE * weight.float().std(correction=0).clamp(min=SMALLEST_NOISE).item()
    noise = torch.randn(weight.shape, generator=stream).to(weight)
    return weight + scale * noise
