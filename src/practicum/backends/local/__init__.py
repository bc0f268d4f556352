"""The backend `local`: transformers' causal language models in this process, on a CPU or one GPU.

See docs/models.md.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from practicum.models.config import ModelConfig, ScorerConfig, ScratchConfig, StudentConfig
from practicum.objective import Objective
from practicum.ports import Backend, BackendContext, ModelEnding, Task
from practicum.ports.hosting import Hosted
from practicum.ports.paper import PaperBackend
from practicum.types import FrozenConfig


class MemoryConfig(FrozenConfig):
    """Limits on memory. None of them changes a result by more than rounding."""

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
        description="tokens whose [., V] log-probabilities are held at once; none: 128 on a CPU, "
        "1,024 on a GPU",
    )
    sampling_batch: int | None = Field(
        default=None,
        ge=1,
        description="completions decoded at once; none: 64 on a CPU, 256 on a GPU",
    )
    decoding: Literal["auto", "native", "graph", "torch"] = Field(
        default="auto",
        description="decode by the step that is compiled on first use (CPU), by a captured graph "
        "(CUDA), or by torch's modules alone; auto: the fastest that machine and model allow",
    )


class Config(MemoryConfig):
    """The settings of a model in this process."""

    checkpoints_here: ClassVar[bool] = True
    adapter_alpha: ClassVar[float | None] = None
    """True: checkpoints hold the student's weights."""
    not_compared: ClassVar[frozenset[str]] = frozenset({"sampling_batch"})
    """Settings that may change when a run is resumed: they change nothing but rounding."""
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


def build(config: Config, context: BackendContext) -> Backend:
    """Open the backend."""
    # Imported on use: this loads transformers, which reading a recipe does not need.
    from practicum.backends.local.backend import LocalBackend

    return LocalBackend(config, context)


def build_on_paper(config: Config, context: BackendContext, answer_tokens: int) -> PaperBackend:
    """Open the backend over weightless models; every completion is `answer_tokens` long."""
    from practicum.backends.local.paper_backend import LocalPaper

    return LocalPaper(config, context, answer_tokens)


def host(config: ModelConfig) -> Hosted:
    """Load a model for a service to hold."""
    from practicum.backends.local.hosted import LocalHosted

    return LocalHosted(config)


def check_files(config: ModelConfig) -> None:
    """Raise ModelError if the config or the tokenizer of a model cannot be read."""
    from practicum.backends.local.loading import open_files

    open_files(config)


def make_scratch(folder: Path, config: ScratchConfig, task: Task) -> Path:
    """Return the folder of a from-scratch model; the first call makes the model.

    Its vocabulary is the task's characters, and it is pretrained on the task's answers.
    """
    from practicum.backends.local.scratch import prepare_scratch_folder

    return prepare_scratch_folder(folder, config, task)


def load_ending(config: ModelConfig) -> ModelEnding:
    """Read the last norm and the head of a model, and nothing else of it."""
    from practicum.backends.local.ending import load_ending as read_ending

    return read_ending(config)
