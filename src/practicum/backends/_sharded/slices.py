"""Read a sharded model: each rank reads only its own rows of the files.

The modules are made without memory, sharded, and then filled. A rank never holds more of the model
than its rows, its buffers, and the rows of the tensor that it is reading.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from practicum.backends._sharded.sharding import (
    SharedWeight,
    build_mesh,
    find_rows,
    gather_weights,
    get_local,
    shard,
)
from practicum.backends.local.language_model import Decoding, LanguageModel
from practicum.backends.local.loading import check_finite, fix_length, set_trainable
from practicum.backends.local.packing import enable_packing, find_max_packed_length
from practicum.backends.local.precision import DTYPES, choose_dtype, prepare_products
from practicum.backends.local.trial import can_decode_natively
from practicum.backends.local.unused_settings import drop_unused_settings
from practicum.errors import ModelError
from practicum.models.config import ModelConfig, StudentConfig
from practicum.models.sources import find_base, is_adapter_folder

INDEX = "model.safetensors.index.json"
"""The index of a model that has its weights in several files."""


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """A sharded model, and the weights of its head, which FSDP ignores."""

    language_model: LanguageModel
    head_weights: tuple[SharedWeight, ...]

    def open(self) -> AbstractContextManager[None]:
        """Let the block call the model like a model of one process; all ranks call this."""
        return gather_weights(self.language_model.model, self.head_weights)


def read_sharded_model(
    source: str,
    config: ModelConfig,
    vocab_size: int,
    device: torch.device,
    seed: int = 0,
    nodes: int = 1,
    decoding: str = "auto",
) -> ShardedModel | None:
    """Read this rank's rows of a model, trainable as the recipe says; all ranks call this.

    Returns None if the files must be read in full because they store the weights in a different
    form than the modules. Raises ModelError if the files do not belong to the model.
    """
    # Merging an adapter changes full weights.
    is_merged = is_adapter_folder(source) and not _has_adapters(config)
    if config.trust_remote_code or is_merged:
        return None
    name = choose_dtype(config, source, device.type)
    model = _build_on_meta(find_base(source), DTYPES[name])
    dtype = model.dtype
    stored = _match_weights(model, _list_weights(find_base(source)))
    if stored is None:
        return None
    if isinstance(config, StudentConfig) and config.lora is None:
        set_trainable(model, config, seed, source)
    language_model = LanguageModel(model, vocab_size, autocast=name == "bfloat16")
    # The attention is replaced while the classes are still transformers' own. The packed length is
    # set below.
    language_model = enable_packing(language_model, 1)
    weights = shard(language_model, build_mesh(device, nodes))
    weights = _allocate(model, weights, device)
    _fill(model, stored, dtype)
    language_model = fix_length(language_model, config)
    prepare_products(config, model, device)
    model.eval()
    if isinstance(config, StudentConfig) and config.lora is not None:
        set_trainable(model, config, seed, source)
    check_finite_rows(model, source)
    with torch.no_grad(), gather_weights(model, weights):
        if language_model.max_packed_tokens:
            longest = find_max_packed_length(language_model)
            language_model = replace(language_model, max_packed_tokens=longest)
        language_model.check_split()
        # Ranks train with the compiled program if a process with the full model would. A shard does
        # not decode, so it needs no captured graph.
        if decoding in ("auto", "native") and can_decode_natively(language_model):
            language_model = replace(language_model, decoding=Decoding.NATIVE)
    return ShardedModel(language_model, weights)


def check_finite_rows(model: PreTrainedModel, source: str) -> None:
    """Raise ModelError in all ranks if a weight of one of them is not finite."""
    error = ""
    try:
        check_finite(model, source)
    except ModelError as found:
        error = str(found)
    errors: list[Any] = [""] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for text in filter(None, errors):
        raise ModelError(text)


def _has_adapters(config: ModelConfig) -> bool:
    return isinstance(config, StudentConfig) and config.lora is not None


def _build_on_meta(source: str, dtype: torch.dtype) -> PreTrainedModel:
    """Build the modules without memory, all weights frozen."""
    described = AutoConfig.from_pretrained(source)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(described, dtype=dtype)
    model.name_or_path = source
    drop_unused_settings(model, source)
    model.requires_grad_(False)
    return model


@dataclass(frozen=True, slots=True)
class _StoredWeight:
    """A tensor in a file; any of its rows can be read."""

    path: Path
    key: str
    shape: torch.Size

    def read(self, rows: slice | None = None) -> Tensor:
        """Read the tensor, or some rows of it."""
        with safe_open(self.path, framework="pt") as file:
            return file.get_tensor(self.key) if rows is None else file.get_slice(self.key)[rows]


def _list_weights(source: str) -> dict[str, _StoredWeight]:
    """Return the tensors of a model's safetensors files; empty if it has none."""
    folder = Path(source)
    if not folder.is_dir():
        folder = Path(snapshot_download(source, allow_patterns=["*.safetensors", "*.json"]))
    names = {"model.safetensors"}
    if (folder / INDEX).is_file():
        names = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    paths = [folder / name for name in sorted(names)]
    if not all(path.is_file() for path in paths):
        return {}
    return {stored.key: stored for path in paths for stored in _list_file(path)}


def _list_file(path: Path) -> Iterator[_StoredWeight]:
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118  (the file is no mapping)
            yield _StoredWeight(path, key, torch.Size(file.get_slice(key).get_shape()))


def _match_weights(
    model: PreTrainedModel, stored: Mapping[str, _StoredWeight]
) -> dict[str, _StoredWeight] | None:
    """Return the stored tensor of each weight and saved buffer, or None if the form of one differs.

    The names are the names in `named_parameters` and `named_buffers`.
    """
    rules = get_model_conversion_mapping(model, add_legacy=False)
    if any(isinstance(rule, WeightConverter) for rule in rules):
        return None
    # Some models keep a few weights in float32; only transformers knows which.
    if model.dtype != torch.float32 and model._keep_in_fp32_modules:
        return None
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    head = model.get_output_embeddings()
    matched: dict[str, _StoredWeight] = {}
    for key, tensor in tensors.items():
        candidates = [stored[name] for name in _spell_keys(model, names[key]) if name in stored]
        # FSDP only keeps the head tied; two copies of any other tied weight could become different.
        is_odd_tie = len(names[key]) > 1 and tensor is not getattr(head, "weight", None)
        if is_odd_tie or len(candidates) != 1 or candidates[0].shape != tensor.shape:
            return None
        matched[names[key][0]] = candidates[0]
    return matched


def _spell_keys(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """Return the names that a file may use; it may omit the prefix that the class adds."""
    prefix = f"{model.base_model_prefix}."
    return list(dict.fromkeys(key for name in names for key in (name, name.removeprefix(prefix))))


def _allocate(
    model: PreTrainedModel, weights: tuple[SharedWeight, ...], device: torch.device
) -> tuple[SharedWeight, ...]:
    """Give this rank's rows memory on a device, and return the head's weights there."""
    model.to_empty(device=device)
    allocated = []
    for weight in weights:
        # The copies of a tied weight were allocated one by one.
        module, name = weight.places[0]
        allocated.append(SharedWeight(getattr(module, name), weight.places))
        allocated[-1].put(allocated[-1].shard)
    return tuple(allocated)


@torch.no_grad()
def _fill(model: PreTrainedModel, stored: Mapping[str, _StoredWeight], dtype: torch.dtype) -> None:
    """Read this rank's rows of all weights, and compute the buffers that no file holds."""
    for name, parameter in model.named_parameters():
        rows = None
        if isinstance(parameter, DTensor):
            rows = find_rows(len(parameter), parameter.device_mesh)
        # Round to the recipe's dtype first, as for the trainable weights of one process.
        get_local(parameter).copy_(stored[name].read(rows).to(dtype))
        # transformers does not initialize a weight with this flag when it computes the buffers.
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    model.initialize_weights()
    for name, buffer in model.named_buffers():
        if name in stored:
            buffer.copy_(stored[name].read())
