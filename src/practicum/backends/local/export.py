"""Export a model folder that transformers and other engines load.

Adapters are merged, weights are in safetensors files, and the tokenizer stands beside them.
"""

import copy
import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from practicum.backends.local.adapter_folders import write_adapter
from practicum.backends.local.adapters import merge_adapters
from practicum.backends.local.loading import LoadedModel
from practicum.core.waits import show_wait
from practicum.errors import ResourceError
from practicum.models.sources import find_base


def export(loaded: LoadedModel, folder: Path, *, adapter: bool = False) -> None:
    """Write the model folder; it appears under its name only when it is complete.

    With `adapter`, write the adapters in peft's format and no model. Raises ModelError if the model
    has none, and ResourceError if the folder exists.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ResourceError(
            f"{folder} exists and is not empty; export to another folder or remove it first"
        )
    with show_wait(f"writing the model folder {folder.name}"):
        _write(loaded, folder, adapter=adapter)


def _write(loaded: LoadedModel, folder: Path, *, adapter: bool) -> None:
    """Write a folder that is not there yet."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.tmp-", dir=folder.parent) as temporary:
        model_dir = Path(temporary) / "model"
        if adapter:
            write_adapter(loaded.language_model.model, find_base(loaded.source), model_dir)
        else:
            _write_model(loaded.language_model.model, model_dir)
        _copy_tokenizer(loaded).save_pretrained(model_dir)
        model_dir.rename(folder)


def _write_model(model: PreTrainedModel, folder: Path) -> None:
    """Write the model with its adapters merged, as `save_pretrained` does."""
    plain = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
    plain.load_state_dict(merge_adapters(model))
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)


def _copy_tokenizer(loaded: LoadedModel) -> PreTrainedTokenizerBase:
    """Return the tokenizer with the chat template that the student was trained with."""
    tokenizer = copy.copy(loaded.renderer.tokenizer)
    if loaded.renderer.template is not None:
        tokenizer.chat_template = loaded.renderer.template
    return tokenizer
