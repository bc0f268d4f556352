"""The backend `local`: transformers' causal language models in this process, on a CPU or one GPU.

See docs/models.md.
"""

from pathlib import Path

from practicum.backends.local.config import Config, MemoryConfig
from practicum.models.config import ModelConfig, ScratchConfig
from practicum.ports import Backend, BackendContext, ModelEnding, Task
from practicum.ports.hosting import Hosted
from practicum.ports.paper import PaperBackend

__all__ = [
    "Config",
    "MemoryConfig",
    "build",
    "build_on_paper",
    "check_files",
    "host",
    "load_ending",
    "make_scratch",
]


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


def make_scratch(
    folder: Path, config: ScratchConfig, task: Task, template: str | None = None
) -> Path:
    """Return the folder of a from-scratch model; the first call makes the model.

    Its vocabulary is the task's characters, and it is pretrained on the task's answers, in the
    chat template of the recipe, if any.
    """
    from practicum.backends.local.scratch import prepare_scratch_folder

    return prepare_scratch_folder(folder, config, task, template)


def load_ending(config: ModelConfig) -> ModelEnding:
    """Read the last norm and the head of a model, and nothing else of it."""
    from practicum.backends.local.ending import load_ending as read_ending

    return read_ending(config)
