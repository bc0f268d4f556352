"""Engines: programs that sample for a student that is trained elsewhere.

An engine has a copy of the student's weights, which is updated after each change.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.types import Sample, SampleRequest, SamplingParams, ScoreRequest


@runtime_checkable
class EngineConfig(Protocol):
    """The settings of an engine in a recipe."""

    @property
    def type(self) -> str:
        """The name of the engine's module, as the recipe writes it."""
        ...

    @property
    def tolerance(self) -> float | None:
        """The nats by which the engine may differ from the trainer; None: by the dtype."""
        ...

    @property
    def may_decline(self) -> bool:
        """True if the backend may sample itself instead; the engine decides at the start."""
        ...

    @property
    def may_sample(self) -> bool:
        """False if the backend always samples itself."""
        ...

    def problems(self, mixes_tokens: bool, staleness: int) -> list[str]:
        """List the features of a recipe that the engine does not support, each with a remedy.

        `mixes_tokens` is True if student and teacher sample each token together.
        """
        ...

    def list_pool_problems(self, processes: int) -> list[str]:
        """List the reasons why this many sampling processes cannot each have an engine."""
        ...


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The engine of a recipe: its settings, and the most tokens of a prompt and its completion."""

    config: EngineConfig
    max_tokens: int


@dataclass(frozen=True, slots=True)
class EngineModel:
    """The student's data that an engine needs before any weights: its architecture and its limits."""

    write_config: Callable[[Path], None]
    """Write the model's `config.json` into a folder."""
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    max_tokens: int
    """The most tokens of a prompt and its completion together."""


@runtime_checkable
class SamplingEngine(Protocol):
    """A program that samples with a copy of the student's weights. Raises EngineError."""

    @property
    def name(self) -> str:
        """The program and its version, which are part of a run's identity: `vllm 0.32.0`."""
        ...

    @property
    def may_lose_weights(self) -> bool:
        """True if the engine may forget its weights between two calls, as a server may."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace all weights, named as in the model's files, and forget cached keys and values.

        Tied weights are given under both names.
        """
        ...

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """Sample one completion per request, each from the random stream of its seed."""
        ...

    def score(self, request: ScoreRequest) -> Float[Tensor, " T"]:
        """Return the log-probabilities of the request's tokens."""
        ...

    def free_memory(self) -> bool:
        """Free memory for training if the settings ask for it; return True if weights are lost."""
        ...

    def close(self) -> None:
        """End the engine, or leave the server."""
        ...
