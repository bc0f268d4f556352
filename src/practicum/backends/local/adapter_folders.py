"""Merge, continue training or write adapter folders in peft's format.

peft reads and writes the files. In between, an adapter is known by the name of the weight that it
changes, because peft's names depend on how its wrappers are nested.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, load_peft_weights
from peft.tuners.lora import LoraLayer, ParamWrapper
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from practicum.backends.local.adapters import ADAPTER_NAME, list_adapted_weights
from practicum.backends.local.pictures import choose_class
from practicum.errors import ModelError
from practicum.text.tokenizers import UNREADABLE, shorten_error

FEATURES = (
    "use_dora",
    "modules_to_save",
    "bias",
    "lora_bias",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "use_qalora",
    "layer_replication",
)
"""Settings of peft's LoRA under which an adapter is more than two factors for each weight."""


def merge_adapter(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    """Return the base model with the adapter merged into new weights; the base does not change."""
    # Merging in place would change every model that shares these weights.
    adapted = _read_adapter(model, folder)
    settings = adapted.peft_config[ADAPTER_NAME]
    if settings.is_prompt_learning or _find_features(settings) & {"alora_invocation_tokens"}:
        raise ModelError(
            f"{folder}: its adapter ({_describe_kind(settings)}) is no change of weights, so it cannot "
            "be merged; use an adapter of weights, such as LoRA"
        )
    return adapted.merge_and_unload(safe_merge=True)  # type: ignore[operator]


@torch.no_grad()
def copy_adapter(folder: str, model: PreTrainedModel) -> None:
    """Copy the values of an adapter folder into the adapters of a model.

    Raises ModelError if rank, scale or adapted weights differ, or if the folder holds more than
    plain low-rank adapters.
    """
    saved = _read_adapter(_build_skeleton(model), folder)
    settings = saved.peft_config[ADAPTER_NAME]
    if not isinstance(settings, LoraConfig) or _find_features(settings):
        raise ModelError(
            f"{folder}: holds more than plain low-rank adapters ({_describe_kind(settings)}), which "
            "cannot be trained further here; leave student.lora out to merge it into the weights"
        )
    sources = dict(list_adapted_weights(saved.get_base_model()))
    trained = dict(list_adapted_weights(model))
    _check_same_adapters(folder, sources, trained)
    # The modules have no values. A file's keys are the paths of peft's modules, without the name of
    # the adapter.
    tensors = load_peft_weights(folder, device="cpu")
    paths = {id(module): path for path, module in saved.named_modules()}
    for name, adapter in trained.items():
        for factor, key in zip(_list_factors(adapter), ("lora_A", "lora_B"), strict=True):
            factor.weight.copy_(tensors[f"{paths[id(sources[name])]}.{key}.weight"])


def _find_features(settings: PeftConfig) -> set[str]:
    """Return the settings of an adapter that plain low-rank adapters do not have."""
    values = settings.to_dict()
    return {key for key in FEATURES if values.get(key) not in (None, False, "none", [], {})}


def _describe_kind(settings: PeftConfig) -> str:
    """Return an adapter's type in peft, with the settings that make it more than plain."""
    kind = str(settings.peft_type).rpartition(".")[2]
    return ", ".join([kind, *sorted(_find_features(settings))])


def write_adapter(model: PreTrainedModel, base: str, folder: Path) -> None:
    """Write the adapters of a model with `PeftModel.save_pretrained`; `base` names its base model.

    Raises ModelError if the model has no adapters.
    """
    trained = dict(list_adapted_weights(model))
    if not trained:
        raise ModelError(
            "this run trained the weights themselves (no student.lora), so there is no adapter to "
            "export; leave --adapter out to export the model"
        )
    layer = next(iter(trained.values()))
    experts = [name for name, adapter in trained.items() if isinstance(adapter, ParamWrapper)]
    maps = {name: adapter for name, adapter in trained.items() if name not in experts}
    # peft accepts a list of full names, and shortens it itself if a suffix is enough.
    settings = LoraConfig(
        r=layer.r[ADAPTER_NAME],
        lora_alpha=layer.lora_alpha[ADAPTER_NAME],
        use_rslora=layer.use_rslora[ADAPTER_NAME],
        target_modules=[name.removesuffix(".weight") for name in maps] or None,
        target_parameters=experts or None,
        fan_in_fan_out=any(isinstance(a.get_base_layer(), Conv1D) for a in maps.values()),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )
    with warnings.catch_warnings():
        # peft uses deprecated names of transformers, and a user cannot change that.
        warnings.simplefilter("ignore", FutureWarning)
        adapted = get_peft_model(_build_skeleton(model), settings, low_cpu_mem_usage=True)
    targets = dict(list_adapted_weights(adapted.get_base_model()))
    for name, adapter in trained.items():
        for weight, target in zip(
            _list_factors(adapter), _list_factors(targets[name]), strict=True
        ):
            target.weight = torch.nn.Parameter(weight.weight.detach())
    # Without this, peft asks the hub for the base's config to see if the vocabulary has changed.
    adapted.save_pretrained(str(folder), save_embedding_layers=False)


def _build_skeleton(model: PreTrainedModel) -> PreTrainedModel:
    """Return the modules of a model's base, without weights and without adapters."""
    with torch.device("meta"):
        return choose_class(model.config.model_type).from_config(model.config)


def _list_factors(adapter: LoraLayer) -> list[Any]:
    """Return the modules of the two factors of an adapter, A and B."""
    return [adapter.lora_A[ADAPTER_NAME], adapter.lora_B[ADAPTER_NAME]]


def _check_same_adapters(
    folder: str, saved: Mapping[str, LoraLayer], trained: Mapping[str, LoraLayer]
) -> None:
    """Raise ModelError if adapters differ in the weights that they change, in rank or in scale."""
    advice = "leave student.lora out, and the adapter is merged into the weights"
    differing = sorted(saved.keys() ^ trained.keys())
    if differing:
        which = "adapts" if differing[0] in saved else "does not adapt"
        raise ModelError(
            f"{folder}: adapts {len(saved)} weights and student.lora {len(trained)} (it {which} "
            f"{differing[0]}), so it cannot be trained on; set the same modules in "
            f"student.lora.targets, or {advice}"
        )
    for name, adapter in trained.items():
        size, saved_size = _describe_size(adapter), _describe_size(saved[name])
        if size != saved_size:
            raise ModelError(
                f"{folder}: its adapter of {name} has {saved_size} and student.lora {size}; set the "
                f"adapter's numbers under student.lora, or {advice}"
            )


def _describe_size(adapter: LoraLayer) -> str:
    """Return the rank of an adapter, and the alpha that gives its scale at that rank."""
    rank = adapter.r[ADAPTER_NAME]
    return f"rank {rank} and alpha {adapter.scaling[ADAPTER_NAME] * rank:g}"


def _read_adapter(model: PreTrainedModel, folder: str) -> PeftModel:
    """Return the model with the folder's adapter next to its weights, unmerged."""
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        try:
            adapted = PeftModel.from_pretrained(model, folder)
        except UNREADABLE as error:
            raise ModelError(
                f"{folder}: the adapter could not be loaded into its base "
                f"({shorten_error(error)}); check base_model_name_or_path in adapter_config.json"
            ) from error
    # peft warns of weights that the file lacks and leaves them at zero.
    for message in messages:
        if "missing adapter keys" in str(message.message):
            raise ModelError(f"{folder}: {shorten_error(message.message)}")  # type: ignore[arg-type]
    return adapted
