"""Read the last norm and the head of a model from its folder, without its body."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from practicum.backends.local.language_model import LanguageModel, find_body
from practicum.backends.local.loading import open_files
from practicum.backends.local.pictures import FAMILIES, SOUND_FAMILIES
from practicum.errors import ModelError
from practicum.functional.head import Head
from practicum.models.config import ModelConfig
from practicum.models.sources import find_folder, is_adapter_folder


@dataclass(frozen=True, slots=True)
class LocalEnding:
    """The last norm and the head of a model; see `practicum.ports.ModelEnding`."""

    norm: torch.nn.Module | None
    head: Head
    width: int
    source: str

    @torch.no_grad()
    def finish(self, stream: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        """Return the hidden states that the head reads, computed from the last layer's output."""
        states = stream.to(self.head.weight.device, torch.float32)
        return states if self.norm is None else self.norm(states)


def load_ending(config: ModelConfig) -> LocalEnding:
    """Read only the last norm and the head of a model, in float32. Raises ModelError."""
    files = open_files(config)
    if is_adapter_folder(files.source):
        raise ModelError(
            f"{files.source}: an adapter has no last norm and no head; merge it into a model folder first, "
            "as the server did"
        )
    described = AutoConfig.from_pretrained(files.source, trust_remote_code=config.trust_remote_code)
    if described.model_type in FAMILIES | SOUND_FAMILIES:
        raise ModelError(
            f"{files.source}: the head of a model of pictures is not read apart from it; let the server give "
            "log-probabilities instead of hidden states"
        )
    with torch.device("meta"):
        # The modules of the full model; a module has no memory until its weights are read.
        model: Any = AutoModelForCausalLM.from_config(
            described, dtype=torch.float32, trust_remote_code=config.trust_remote_code
        )
    model.requires_grad_(False)
    model.tie_weights()
    files.check_rows(model)
    norm = find_norm(model, files.source)
    names = _name_weights(model)
    for module in filter(None, (norm, model.get_output_embeddings())):
        for key, weight in list(module.named_parameters(recurse=False)):
            read = _read_weight(files.source, names[id(weight)]).to(files.device, torch.float32)
            if read.shape != weight.shape:
                raise ModelError(
                    f"{files.source}: {names[id(weight)][0]} has shape {tuple(read.shape)}, and "
                    f"config.json says {tuple(weight.shape)}; the files do not belong together"
                )
            setattr(module, key, torch.nn.Parameter(read, requires_grad=False))
    head = LanguageModel(model, files.vocab_size).head()
    return LocalEnding(norm, head, described.get_text_config().hidden_size, files.source)


def find_norm(model: PreTrainedModel, source: str) -> torch.nn.Module | None:
    """Return the norm after the last layer, or None for a body without a last norm."""
    children = [child for _, child in find_body(model).named_children()]
    # A norm is a direct child of the body that has one or two vectors and contains no layer.
    norms = [
        child
        for child in children
        if not list(child.children())
        and (weights := list(child.parameters()))
        and all(weight.ndim == 1 for weight in weights)
    ]
    if len(norms) > 1:
        raise ModelError(
            f"{source}: {type(model).__name__} has {len(norms)} norms outside its layers, and "
            "it is unknown which is the last; use another model"
        )
    return norms[0] if norms else None


def _name_weights(model: PreTrainedModel) -> dict[int, list[str]]:
    """Return all names of each weight: tied ones have several."""
    names: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    return names


def _read_weight(source: str, names: Sequence[str]) -> Tensor:
    """Return the weight that a model's folder holds under one of the names."""
    for path in sorted(find_folder(source).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in _match_keys(file.keys(), names):
                return file.get_tensor(key)
    raise ModelError(f"{source}: no file holds {' or '.join(names)}; copy the missing file too")


def _match_keys(keys: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    # A file may leave out the prefix that the model's class adds to its names.
    for key in keys:
        if any(f".{name}".endswith(f".{key}") for name in names):
            yield key
