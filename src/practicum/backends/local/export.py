"""A folder that transformers and other engines load: adapters merged, weights in safetensors, tokenizer beside them."""

import copy
import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from practicum.backends.local.adapters import merged_weights
from practicum.backends.local.loading import LoadedModel
from practicum.errors import ResourceError


def export(loaded: LoadedModel, folder: Path) -> None:
    """Write the model folder; it appears under its name only when it is whole."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ResourceError(
            f"{folder} exists and is not empty; export to another folder or remove it first"
        )
    model = loaded.language_model.model
    plain = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
    plain.load_state_dict(merged_weights(model))
    plain.generation_config = model.generation_config
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.tmp-", dir=folder.parent) as temporary:
        inside = Path(temporary) / "model"
        plain.save_pretrained(inside)
        _tokenizer(loaded).save_pretrained(inside)
        inside.rename(folder)


def _tokenizer(loaded: LoadedModel) -> PreTrainedTokenizerBase:
    """The tokenizer with the chat template that the student was trained with."""
    tokenizer = copy.copy(loaded.renderer.tokenizer)
    if loaded.renderer.template is not None:
        tokenizer.chat_template = loaded.renderer.template
    return tokenizer
