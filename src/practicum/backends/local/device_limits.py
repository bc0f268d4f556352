"""Limit the work done at once, by device.

The caches of a processor hold the activations of about a thousand tokens, and larger passes are no
faster (`python -m benchmarks sizes`). A GPU needs about ten thousand tokens to be busy, and
starting an operation takes as long as computing hundreds of tokens.
"""

import sys
from dataclasses import dataclass

import torch

from practicum.backends.local.config import MemoryConfig


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """The default maximum numbers of tokens, rows and bytes at once."""

    scored_tokens: int
    """Tokens scored in one pass."""
    prefill_tokens: int
    """Tokens of waiting prompts in one prefill."""
    chunk_tokens: int
    """Tokens with [., V] log-probabilities in memory at once."""
    graph_mib: int
    """Memory for the activations of a backward pass."""
    sampling_batch: int
    """Completions decoded at once."""
    decode_bytes: int
    """Memory for the keys and values of one sampling call."""
    service_bytes: int
    """Memory for the keys and values of the completions that a service decodes."""
    service_rows: int
    """Completions that a service decodes at once."""


ON_CPU = DeviceLimits(
    scored_tokens=1024,
    prefill_tokens=1024,
    chunk_tokens=128,
    graph_mib=1024,
    sampling_batch=64,
    decode_bytes=sys.maxsize,
    service_bytes=2**30,
    service_rows=64,
)


def find_limits(device: torch.device) -> DeviceLimits:
    """Return a device's limits; they do not depend on the memory that is currently free."""
    if device.type != "cuda":
        return ON_CPU
    return size_gpu(torch.cuda.get_device_properties(device).total_memory)


def size_gpu(memory: int) -> DeviceLimits:
    """Return the limits of a GPU with `memory` bytes."""
    return DeviceLimits(
        scored_tokens=16384,
        prefill_tokens=8192,
        chunk_tokens=1024,
        graph_mib=max(memory // 4 // 2**20, 1),
        sampling_batch=256,
        decode_bytes=memory // 2,
        service_bytes=memory // 4,
        service_rows=256,
    )


@dataclass(frozen=True, slots=True)
class TrainerLimits:
    """Limits on memory: the most tokens or completions processed at once.

    They bound the tokens of a micro-batch, the tokens of a chunk of the logit side, and the
    completions decoded together. Without `micro_batch_tokens`, a micro-batch holds as many tokens
    as `graph_mib` of activations allow.
    """

    micro_batch_tokens: int | None = None
    chunk_tokens: int = 128
    sampling_batch: int = 64
    graph_mib: int = 1024


def build_limits(device: torch.device, config: MemoryConfig | None = None) -> TrainerLimits:
    """Return the limits that a recipe sets, with the device's limits as defaults."""
    return fill_limits(find_limits(device), config or MemoryConfig())


def fill_limits(device_limits: DeviceLimits, settings: MemoryConfig) -> TrainerLimits:
    """Return the limits that a recipe sets, with these limits as defaults."""
    return TrainerLimits(
        settings.micro_batch_tokens,
        settings.chunk_tokens or device_limits.chunk_tokens,
        settings.sampling_batch or device_limits.sampling_batch,
        settings.graph_mib or device_limits.graph_mib,
    )
