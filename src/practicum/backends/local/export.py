"""A folder that transformers and other engines load: adapters merged, weights in safetensors, tokenizer beside them."""

import copy
import tempfile
from pathlib import Path

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from practicum.backends.local.loading import LoadedModel
from practicum.errors import ResourceError


@torch.no_grad()
def merged_weights(loaded: LoadedModel) -> dict[str, Tensor]:
    """The model's state with every adapter added to the weight it adapts, under the base model's names."""
    model = loaded.language_model.model
    state = {
        name.replace(".base_layer.", "."): value for name, value in model.state_dict().items() if ".lora_" not in name
    }
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            for adapter in module.active_adapters:
                delta = module.get_delta_weight(adapter)  # type: ignore[operator]
                state[f"{name}.weight"] = state[f"{name}.weight"] + delta.to(state[f"{name}.weight"].dtype)
    return state


def export(loaded: LoadedModel, folder: Path) -> None:
    """Write the model folder; it appears under its name only when it is whole."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ResourceError(f"{folder} exists and is not empty; export to another folder or remove it first")
    model = loaded.language_model.model
    plain = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
    plain.load_state_dict(merged_weights(loaded))
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
