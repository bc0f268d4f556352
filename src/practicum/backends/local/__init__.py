"""The backend `local`: causal language models of transformers (see docs/models.md), in this process, on a CPU or one GPU."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from practicum.models.config import ModelConfig, ScratchConfig, StudentConfig
from practicum.objective import Objective
from practicum.ports import Backend, BackendContext, Task
from practicum.ports.hosting import Hosted
from practicum.ports.paper import PaperBackend


class Config(BaseModel):
    """Bounds on what is held at once; none of them changes what is computed, but for rounding."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    checkpoints_here: ClassVar[bool] = True
    """Checkpoints hold the student's weights."""
    not_compared: ClassVar[frozenset[str]] = frozenset({"sampling_batch"})
    """Settings that may be other ones in a resumed run, because they change no token and no more than rounding."""
    type: Literal["local"] = "local"
    micro_batch_tokens: int | None = Field(
        default=None,
        ge=1,
        description="tokens that go through the student together; none: as many as graph_mib holds",
    )
    graph_mib: int = Field(
        default=1024,
        ge=1,
        description="memory for what a backward pass keeps; layers are recomputed if one text needs more",
    )
    chunk_tokens: int = Field(
        default=128, ge=1, description="tokens whose [., V] log-probabilities are held at once"
    )
    sampling_batch: int = Field(default=64, ge=1, description="completions decoded at once")

    def problems(
        self, student: StudentConfig, objective: Objective, source: str, staleness: int
    ) -> list[str]:
        """Every student and every objective can be trained here."""
        return []


def build(config: Config, context: BackendContext) -> Backend:
    """Open the backend."""
    from practicum.backends.local.backend import (
        LocalBackend,  # loads transformers, which a recipe's reader does not need
    )

    return LocalBackend(config, context)


def build_on_paper(config: Config, context: BackendContext, answer_tokens: int) -> PaperBackend:
    """Open the same over models that have sizes and no weights; every answer is `answer_tokens` long."""
    from practicum.backends.local.paper_backend import LocalPaper

    return LocalPaper(config, context, answer_tokens)


def host(config: ModelConfig) -> Hosted:
    """Load a model to be held by a service."""
    from practicum.backends.local.hosted import LocalHosted

    return LocalHosted(config)


def make_scratch(folder: Path, config: ScratchConfig, task: Task) -> Path:
    """Return the folder of a from-scratch model, made the first time with the characters and the answers of the task."""
    from practicum.backends.local.scratch import scratch_folder

    return scratch_folder(folder, config, task)
