"""Low-rank adapters (LoRA, arXiv 2106.09685) in the layers of a model, and their merged weights.

A linear map W becomes W + (alpha / rank) B A, or with rsLoRA
W + (alpha / sqrt(rank)) B A. The weights of a mixture's experts have three axes, and each expert gets
its own A and B. This module picks the modules to adapt itself: peft's search by name picks the wrong
modules in some mixtures of experts.
"""

import math
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear, LoraLayer, ParamWrapper
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from practicum.backends.local.language_model import find_layers
from practicum.backends.local.quantising import PackedLinear, expand_weight
from practicum.errors import ModelError
from practicum.models.config import Lora

PARTS = ("attention", "mlp")
"""The halves of a layer: one mixes tokens, and the other treats each token separately."""

MIXER_NAMES = ("attn", "attention", "mamba", "mixer", "conv", "temporal")
"""Parts of the names of modules that mix tokens."""

ADAPTER_NAME = "default"
"""The name under which peft stores the only adapter of a module."""


class ExpertAdapter(ParamWrapper):
    """A low-rank change of one weight of a mixture's experts.

    The experts compute with the changed weight instead of the plain one.
    """

    # peft swaps the weight with torch's parametrizations, and all threads share their cache: while
    # a sampler's thread runs its experts, a trainer's thread would compute with an older step's
    # weights.
    def forward(self, x: Tensor, *routing: Tensor) -> Tensor:
        """Run the experts on `x` with the adapted weight."""
        changed = self.get_param() + self.get_delta_weight(ADAPTER_NAME)
        depth = sum(isinstance(module, ExpertAdapter) for module in self.base_layer.modules())
        # Each adapted weight wraps the experts once more, so the weight lies `depth` wrappers down.
        path = "base_layer." * depth + self.parameter_name
        return torch.func.functional_call(self.base_layer, {path: changed}, (x, *routing))


def add_adapters(
    model: PreTrainedModel, lora: Lora, seed: int, layers: list[int], parts: tuple[str, ...] = PARTS
) -> None:
    """Put seeded adapters around some layers' linear maps and experts; freeze other weights.

    `parts` selects halves of a layer. Raises ModelError if there is nothing to adapt, or if an
    adapter cannot be merged into a weight of the model.
    """
    names = model.state_dict().keys()
    model.requires_grad_(False)
    stack = get_layers(model)
    inside = {name: m for name, m in stack.named_modules() if _is_within(name, layers, parts)}
    bypassing = set(chain.from_iterable(map(_find_maps_that_bypass_adapters, inside.values())))
    maps = [name for name, m in inside.items() if is_linear_map(m) and m not in bypassing]
    experts = [(name, weight) for name, m in inside.items() for weight in list_expert_weights(m)]
    if lora.targets is not None:
        maps, experts = _select_targets(lora.targets, maps, experts)
    if not maps and not experts:
        raise ModelError(
            f"{model.name_or_path}: no linear map of {' or '.join(parts) or 'no part'} to adapt "
            "was found; leave lora out to train the weights themselves"
        )
    with torch.random.fork_rng(), torch.device("meta" if model.device.type == "meta" else "cpu"):
        torch.manual_seed(seed)
        for name in maps:
            stack.set_submodule(name, _wrap_map(inside[name], lora))
        for name, weight in experts:
            settings: Any = (
                ADAPTER_NAME,
                weight,
                LoraConfig(use_rslora=lora.rslora),
                lora.rank,
                lora.alpha,
            )
            stack.set_submodule(name, ExpertAdapter(stack.get_submodule(name), *settings))
    _check_mergeable(model, names)


@torch.no_grad()
def merge_adapters(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the state dict under the base model's names, each adapter added to its weight.

    Weights with fewer bits are expanded.
    """
    weights = {name: w for name, w in model.state_dict().items() if not is_adapter(name)}
    state = {strip_wrappers(name): expand_weight(weight) for name, weight in weights.items()}
    for name, adapter in list_adapted_weights(model):
        delta = adapter.get_delta_weight(ADAPTER_NAME)  # type: ignore[operator]
        state[name] = state[name] + delta.to(state[name].dtype)
    return state


def is_adapter(name: str) -> bool:
    """Return True if a parameter of this name belongs to an adapter."""
    return ".lora_" in name


def strip_wrappers(name: str) -> str:
    """Return the name that a parameter or a module had before adapters wrapped it."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


def get_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """Return the model's layers; raise ModelError if they cannot be found."""
    layers = find_layers(model)
    if layers is None:
        count = model.config.get_text_config().num_hidden_layers
        raise ModelError(
            f"{model.name_or_path}: its {count} layers were not found, so it can only be trained "
            "in full; leave lora and trainable_layers out"
        )
    return layers


def is_linear_map(module: torch.nn.Module) -> bool:
    """Return True if a module only multiplies by its weight; some routers do more."""
    if type(module).forward in (torch.nn.Linear.forward, Conv1D.forward, PackedLinear.forward):
        return True
    return isinstance(module, torch.nn.Linear) and _is_plain_product(module)


@torch.no_grad()
def _is_plain_product(module: torch.nn.Linear) -> bool:
    """Return True if a class's own forward pass (Falcon's) gives the plain product."""
    # Use stand-in tensors with known values: the module may be on the meta device without weights.
    stand_ins = {
        name: _build_ramp(weight.shape) for name, weight in module.named_parameters(recurse=False)
    }
    probe = _build_ramp((1, module.in_features))
    result = torch.func.functional_call(module, stand_ins, (probe,))
    expected = torch.nn.functional.linear(probe, stand_ins["weight"], stand_ins.get("bias"))
    return (
        isinstance(result, Tensor)
        and result.shape == expected.shape
        and torch.allclose(result, expected)
    )


def _build_ramp(shape: tuple[int, ...]) -> Tensor:
    return torch.linspace(-1.0, 1.0, math.prod(shape)).reshape(shape)


def list_expert_weights(module: torch.nn.Module) -> list[str]:
    """Return the names of weights that hold all experts, [experts, ., .], if there are any."""
    if not type(module).__name__.endswith("Experts"):
        return []
    weights = module.named_parameters(recurse=False)
    return sorted(name for name, weight in weights if weight.ndim == 3)


def find_expert_parameters(model: PreTrainedModel) -> Iterator[tuple[torch.nn.Parameter, int]]:
    """Yield each parameter that holds several experts, adapters included, and their number."""
    for module in model.modules():
        for name in list_expert_weights(module):
            weight = module.get_parameter(name)
            yield weight, len(weight)
        if isinstance(module, ExpertAdapter):
            for low_rank in (module.lora_A, module.lora_B):
                yield low_rank.get_parameter(f"{ADAPTER_NAME}.weight"), module.num_experts


def _is_within(name: str, layers: list[int], parts: tuple[str, ...]) -> bool:
    """Return True if a module's name, relative to the layers, is in these layers and halves."""
    number, _, inner = name.partition(".")
    part = "attention" if any(mixer in inner for mixer in MIXER_NAMES) else "mlp"
    return bool(inner) and int(number) in layers and part in parts


def _select_targets(
    targets: tuple[str, ...], maps: list[str], experts: list[tuple[str, str]]
) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the maps and the experts' weights with one of the names; ModelError if a name has none.

    A name is the end of a path, as in peft: `q_proj`, or `self_attn.q_proj`.
    """
    paths = [*maps, *map(".".join, experts)]
    selected = {path for path in paths for name in targets if path.endswith(f".{name}")}
    for name in targets:
        if not any(path.endswith(f".{name}") for path in selected):
            names = sorted({path.rpartition(".")[2] for path in paths})
            raise ModelError(
                f"student.lora.targets: no module named {name} can have an adapter; there are "
                f"{', '.join(names)}"
            )
    return (
        [name for name in maps if name in selected],
        [pair for pair in experts if ".".join(pair) in selected],
    )


def _find_maps_that_bypass_adapters(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the maps with weights that a module passes to a kernel, which would ignore an adapter.

    A state-space mixer does so with all but its first map, on machines that have its kernels.
    """
    if not {"A_log", "D"} <= {name for name, _ in module.named_parameters(recurse=False)}:
        return []
    return [inner for name, inner in module.named_children() if name != "in_proj"]


def _wrap_map(module: torch.nn.Module, lora: Lora) -> Linear:
    transposed = isinstance(module, Conv1D)
    # peft types its alpha as int and takes any number.
    settings: Any = (
        LoraConfig(fan_in_fan_out=transposed, use_rslora=lora.rslora),
        lora.rank,
        lora.alpha,
    )
    return Linear(module, ADAPTER_NAME, *settings, is_target_conv_1d_layer=transposed)


def list_adapted_weights(model: torch.nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    """Yield each adapter with the name of its weight in the base model."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            weight = module.parameter_name if isinstance(module, ParamWrapper) else "weight"
            yield f"{strip_wrappers(name)}.{weight}", module


def _check_mergeable(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Raise ModelError unless `merge_adapters` gives weights of these names.

    Checking before training is cheaper than failing at the export after it.
    """
    exported = {strip_wrappers(name) for name in model.state_dict() if not is_adapter(name)}
    adapted = {name for name, _ in list_adapted_weights(model)}
    unknown = sorted((exported ^ set(names)) | (adapted - exported))
    if unknown:
        raise ModelError(
            f"{model.name_or_path}: its adapters could not be exported, for {unknown[0]} is not a "
            "weight of the model; leave lora out to train the weights themselves"
        )
