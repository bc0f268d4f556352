"""Export a model folder that transformers and other engines load.

Adapters are merged, weights are in safetensors files, and the tokenizer is next to them. A folder
gets its final name only after it has been read again and compared with the student.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from practicum.backends.local.adapter_folders import write_adapter
from practicum.backends.local.adapters import merge_adapters
from practicum.backends.local.export_check import check_export
from practicum.backends.local.loading import LoadedModel
from practicum.backends.local.pictures import choose_class, copy_processor
from practicum.core.waits import show_wait
from practicum.errors import ModelError, ResourceError
from practicum.models.files import name_when_complete
from practicum.models.sources import find_base


def export(loaded: LoadedModel, folder: Path, *, adapter: bool = False) -> None:
    """Write the model folder; it gets its final name only when it is complete and checked.

    With `adapter`, write the adapters in peft's format and no model. Raises ModelError if the model
    has no adapters or the written folder holds another model, and ResourceError if the folder
    exists or cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ResourceError(
            f"{folder} exists and is not empty; export to another folder or remove it first"
        )
    with (
        show_wait(f"writing the model folder {folder.name}"),
        name_when_complete(folder) as staging,
    ):
        if adapter:
            write_adapter(loaded.language_model.model, find_base(loaded.source), staging)
        else:
            _write_model(loaded.language_model.model, staging)
        _copy_tokenizer(loaded).save_pretrained(staging)
        copy_processor(find_base(loaded.source), staging)
        try:
            check_export(loaded, staging)
        except (ModelError, ResourceError) as error:
            raise type(error)(
                f"{folder.name}: not exported, since it failed its check: {error}"
            ) from error


def _write_model(model: PreTrainedModel, folder: Path) -> None:
    """Write the model with its adapters merged, as `save_pretrained` does."""
    # On the meta device: only merged weights take memory in addition to the student's.
    kind = choose_class(model.config.model_type)
    with torch.device("meta"):
        plain = kind.from_config(_describe(model), dtype=model.dtype)
    dtypes = {name: weight.dtype for name, weight in plain.state_dict().items()}
    merged = merge_adapters(model)
    weights = {name: weight.to(dtypes[name]) for name, weight in merged.items()}
    plain.load_state_dict(weights, assign=True)
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)


def _describe(model: PreTrainedModel) -> PretrainedConfig:
    """Return the model's config with a `tie_word_embeddings` that matches the weights."""
    # transformers reads a folder with both matrices as a model with a separate head even if its
    # config ties them. Other engines would drop the head.
    config = copy.deepcopy(model.config)
    head: Any = model.get_output_embeddings()
    is_tied = head.weight is model.get_input_embeddings().weight
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = is_tied
    return config


def _copy_tokenizer(loaded: LoadedModel) -> PreTrainedTokenizerBase:
    """Return the tokenizer with the chat template that the student was trained with."""
    tokenizer = copy.copy(loaded.renderer.tokenizer)
    if loaded.renderer.template is not None:
        tokenizer.chat_template = loaded.renderer.template
    return tokenizer
