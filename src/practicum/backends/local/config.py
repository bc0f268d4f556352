"""The settings of a model in this process, and its limits on memory."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from practicum.models.config import ScorerConfig, StudentConfig
from practicum.objective import Objective
from practicum.types import FrozenConfig


class MemoryConfig(FrozenConfig):
    """Limits on memory. They change results only by rounding."""

    micro_batch_tokens: int | None = Field(
        default=None,
        ge=1,
        description="tokens in one micro-batch of the student; none: as many as graph_mib holds",
    )
    graph_mib: int | None = Field(
        default=None,
        ge=1,
        description="memory for a backward pass's activations; layers are recomputed if one text "
        "needs more; none: 1,024 on a CPU, a quarter of a GPU",
    )
    chunk_tokens: int | None = Field(
        default=None,
        ge=1,
        description="tokens with [., V] log-probabilities in memory at once; none: 128 on a CPU, "
        "1,024 on a GPU",
    )
    sampling_batch: int | None = Field(
        default=None,
        ge=1,
        description="completions decoded at once; none: 64 on a CPU, 256 on a GPU",
    )
    decoding: Literal["auto", "native", "graph", "torch"] = Field(
        default="auto",
        description="decode with the step that is compiled on first use (CPU), with a captured "
        "graph (CUDA), or only with torch's modules; auto: the fastest that works here",
    )


class Config(MemoryConfig):
    """The settings of a model in this process."""

    checkpoints_here: ClassVar[bool] = True
    """True: checkpoints hold the student's weights."""
    adapter_alpha: ClassVar[float | None] = None
    not_compared: ClassVar[frozenset[str]] = frozenset({"sampling_batch"})
    """Settings that may change when a run is resumed: they only change rounding."""
    type: Literal["local"] = "local"

    def build_single(self) -> "Config":
        """Return the settings of a backend that opens the checkpoints in one process."""
        return self

    def problems(
        self,
        student: StudentConfig,
        objective: Objective,
        mixes_tokens: bool,
        staleness: int,
        models: Mapping[str, ScorerConfig],
    ) -> list[str]:
        """Return no problem: this backend trains every student and every objective."""
        return []
