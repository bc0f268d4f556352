"""A model as the teacher: a folder, a hub name or a packaged model, with the student's tokens."""

import hashlib
import json
from pathlib import Path
from typing import Literal

from practicum.models.config import ModelConfig, ScorerConfig, ScratchConfig
from practicum.models.digests import digest_model, find_commit
from practicum.models.files import digest_file
from practicum.models.sources import ADAPTER_SETTINGS, is_adapter_folder
from practicum.objective import EVERY_SIGNAL
from practicum.ports import (
    Capabilities,
    Teacher,
    TeacherConfig,
    TeacherContext,
)
from practicum.teaching.client import ClientTeacher
from practicum.teaching.vocabulary import translate_client


class Config(TeacherConfig, ScorerConfig):
    """The model that scores, with its own chat template, stop tokens and thinking mode."""

    type: Literal["model"] = "model"

    def capabilities(self) -> Capabilities:
        """Return every signal: the model is local."""
        return EVERY_SIGNAL


def build(config: Config, context: TeacherContext) -> Teacher:
    """Load the model and check that its tokens agree with the student's."""
    model = context.load_model(config)
    loaded = _name_folder(config, model.source).model_copy(
        update={"dtype": model.dtype or config.dtype}
    )
    client = context.wrap_client(model.client, lambda folder: compute_fingerprint(loaded))
    client = translate_client(client, model.renderer, context)
    return ClientTeacher(context.count_client(client), model.renderer)


def compute_fingerprint(config: ModelConfig) -> str:
    """Return the SHA-256 of the inputs of a model's answers: weights, settings, code and dtype.

    A model from the hub is identified by its name and commit, a packaged model by its name, and a
    model made from scratch by its settings.
    """
    # The template is not part of it: a key in the store holds the tokens of the rendered prompt.
    bits = config.quantization if isinstance(config, ScorerConfig) else None
    # Stores of unquantized models keep the keys from before quantization was supported.
    # `build` names the dtype that `auto` chose, and on a CPU it is float32.
    dtype = "float32" if config.dtype == "auto" else config.dtype
    facts = [dtype, _identify(config), *([bits] if bits else [])]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _name_folder(config: ModelConfig, source: str) -> ModelConfig:
    """Return the settings with the model folder that was read, if a run's folder is named."""
    folder = Path(str(config.model)).expanduser()
    is_run = folder.is_dir() and not any(
        (folder / name).is_file() for name in ("config.json", ADAPTER_SETTINGS)
    )
    return config.model_copy(update={"model": source}) if is_run else config


def _identify(config: ModelConfig) -> object:
    if isinstance(config.model, ScratchConfig):
        return config.model.model_dump()
    folder = Path(config.model).expanduser()
    if folder.is_file():
        return digest_file(folder)
    if not folder.is_dir():
        return [config.model, (find_commit(config.model) or "") if "/" in config.model else ""]
    if is_adapter_folder(str(folder)):
        return digest_model(str(folder))
    paths = [folder / "config.json", *folder.glob("*.safetensors"), *folder.glob("*.py")]
    return [[path.name, digest_file(path)] for path in sorted(paths)]
