"""Another model scores: a folder, a hub name or a packaged model whose vocabulary is the student's."""

import hashlib
import json
from pathlib import Path
from typing import Literal

from practicum.models.config import ModelConfig, ScorerConfig, ScratchConfig
from practicum.models.files import commit_of
from practicum.ports import Capabilities, Teacher, TeacherContext
from practicum.teachers._client import ClientTeacher


class Config(ScorerConfig):
    """The model that scores; its chat template, stop tokens and thinking mode are its own."""

    type: Literal["model"] = "model"

    def capabilities(self) -> Capabilities:
        """A local model gives every signal."""
        return Capabilities(signals=frozenset({"sampled", "topk", "full"}), follows_student=False)


def build(config: Config, context: TeacherContext) -> Teacher:
    """Load the model and check that it speaks the student's vocabulary."""
    model = context.load_model(config)
    client = context.keep(model.client, lambda place: fingerprint(config))
    return ClientTeacher(context.count(client), model.renderer)


def fingerprint(config: ModelConfig) -> str:
    """Return the SHA-256 over what a model's answers depend on: weights, settings, code and dtype.

    A model from the hub is known by its name and commit, a packaged one by its name, one made from scratch by its settings.
    """
    return hashlib.sha256(json.dumps([config.dtype, _weights(config)]).encode()).hexdigest()


def _weights(config: ModelConfig) -> object:
    if isinstance(config.model, ScratchConfig):
        return config.model.model_dump()
    folder = Path(config.model).expanduser()
    if not folder.is_dir():
        return [config.model, (commit_of(config.model) or "") if "/" in config.model else ""]
    sums = []
    for path in sorted(
        [folder / "config.json", *folder.glob("*.safetensors"), *folder.glob("*.py")]
    ):
        with path.open("rb") as file:
            sums.append([path.name, hashlib.file_digest(file, "sha256").hexdigest()])
    return sums
