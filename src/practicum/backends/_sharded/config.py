"""The settings that every backend of sharded trainers has."""

from collections.abc import Mapping
from typing import ClassVar, Self

import torch
from pydantic import Field, model_validator

from practicum.backends.local.config import Config as LocalConfig
from practicum.backends.local.config import MemoryConfig
from practicum.models.config import ScorerConfig, StudentConfig
from practicum.objective import Objective

CAN_SHARD = torch.__version__ >= "2.9"
"""True if `fully_shard` can ignore weights and sum gradients; older releases lack the arguments."""


class ShardedConfig(MemoryConfig):
    """The ranks of a trainer, and the memory limits of each rank."""

    checkpoints_here: ClassVar[bool] = True
    adapter_alpha: ClassVar[float | None] = None
    """True: checkpoints hold the student's weights."""
    not_compared: ClassVar[frozenset[str]] = frozenset(
        {"sampling_batch", "trainers", "nodes", "patience", "start_patience", "silence"}
    )
    """Settings that may change when a run is resumed: they only change rounding."""
    trainers: int = Field(
        default=1,
        ge=1,
        description="processes that train together, each with a shard of the student; one GPU each",
    )
    nodes: int = Field(
        default=1,
        ge=1,
        description="machines of the trainers; each machine holds all shards of the student",
    )
    patience: float = Field(
        default=1800.0, gt=0, description="timeout of each request to a process, in seconds"
    )
    start_patience: float = Field(
        default=3600.0,
        gt=0,
        description="timeout for starting a process and loading a model, in seconds",
    )
    silence: float = Field(
        default=20.0,
        gt=0,
        description="seconds without a sign of life after which a process counts as stuck",
    )

    @model_validator(mode="after")
    def _check_nodes(self) -> Self:
        if self.trainers % self.nodes:
            raise ValueError(
                f"{self.trainers} trainers cannot be divided among {self.nodes} nodes; set "
                f"trainers: {self.nodes * max(self.trainers // self.nodes, 1)}"
            )
        return self

    def build_single(self) -> LocalConfig:
        """Return the settings of the local backend, which opens the same checkpoints."""
        names = MemoryConfig.model_fields
        return LocalConfig(**{name: getattr(self, name) for name in names})

    def problems(
        self,
        student: StudentConfig,
        objective: Objective,
        mixes_tokens: bool,
        staleness: int,
        models: Mapping[str, ScorerConfig],
    ) -> list[str]:
        """List settings that separate processes do not support, each with a replacement."""
        backend = type(self).model_fields["type"].default
        problems = []
        if not CAN_SHARD:
            problems.append(
                f"backend {backend!r} needs torch 2.9 or newer, for FSDP2 with weights apart, and "
                f"torch {torch.__version__} is installed; install a newer one, or leave backend out"
            )
        if student.quantization is not None:
            problems.append(
                f"student.quantization: {student.quantization!r} rounds whole matrices, and backend "
                f"{backend!r} keeps them in shards; remove it, or leave backend out"
            )
        if mixes_tokens:
            problems.append(
                "rollout.source: it decodes token by token with the teacher, and processes "
                f"of backend {backend!r} answer with whole texts; set source: mix(other=teacher)"
            )
        return problems
