"""Low-rank adapters (LoRA, arXiv 2106.09685) in the layers of a model: where they are put, and the weights that they make.

A linear map W becomes W + (alpha / rank) B A. The experts of a mixture are weights of three axes, in which each expert has an A
and a B of its own. The modules to adapt are picked here and not by peft's search by name, which takes some names of mixtures
of experts to mean other modules.
"""

import math
from collections.abc import Iterable, Iterator

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear, LoraLayer, ParamWrapper
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from practicum.backends.local.language_model import find_layers
from practicum.errors import ModelError
from practicum.models.config import Lora

PARTS = ("attention", "mlp")
"""The halves of a layer: what mixes tokens, and what works on each token alone."""

MIXERS = ("attn", "attention", "mamba", "mixer", "conv", "temporal")
"""What stands in the names of the modules that mix tokens."""

SET = "default"
"""The name of the one set of adapters."""


class ExpertAdapter(ParamWrapper):
    """A low-rank change of one weight of a mixture's experts.

    While the experts compute, the changed weight stands in for the plain one. peft does the same by torch's parametrizations,
    whose cache is one for all threads: as long as a sampler's thread is within its experts, a trainer's thread would go on with
    the weights of an earlier step.
    """

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        """Compute as the experts do."""
        changed = self.get_param() + self.get_delta_weight(SET)
        depth = sum(isinstance(module, ExpertAdapter) for module in self.base_layer.modules())
        path = (
            "base_layer." * depth + self.parameter_name
        )  # adapters of the other weights lie in between
        return torch.func.functional_call(self.base_layer, {path: changed}, (x, *others))


def add_adapters(
    model: PreTrainedModel, lora: Lora, seed: int, layers: list[int], parts: tuple[str, ...] = PARTS
) -> None:
    """Put seeded adapters around the linear maps and the experts of some layers; nothing else of the model learns.

    `parts` says of which halves of a layer. Raises ModelError where there is nothing to adapt, or where what the adapters make
    is not a weight of the model.
    """
    names = model.state_dict().keys()
    model.requires_grad_(False)
    stack = layers_of(model)
    inside = [
        (name, module) for name, module in stack.named_modules() if _is_within(name, layers, parts)
    ]
    past = {id(inner) for _, module in inside for inner in _read_past_adapters(module)}
    maps = [
        (name, module)
        for name, module in inside
        if is_linear_map(module) and id(module) not in past
    ]
    experts = [(name, weight) for name, module in inside for weight in expert_weights(module)]
    if not maps and not experts:
        raise ModelError(
            f"{model.name_or_path}: no linear map of {' or '.join(parts) or 'no part'} to adapt was found; leave lora out to "
            "train the weights themselves"
        )
    with torch.random.fork_rng(), torch.device("meta" if model.device.type == "meta" else "cpu"):
        torch.manual_seed(seed)
        for name, module in maps:
            stack.set_submodule(name, _around_map(module, lora))
        for name, weight in experts:
            stack.set_submodule(name, _around_experts(stack.get_submodule(name), weight, lora))
    _check_mergeable(model, names)


@torch.no_grad()
def merged_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the model's state with every adapter added to the weight it adapts, under the base model's names."""
    state = {
        base_name(name): value for name, value in model.state_dict().items() if not is_adapter(name)
    }
    for name, adapter in _adapted_weights(model):
        delta = adapter.get_delta_weight(SET)  # type: ignore[operator]
        state[name] = state[name] + delta.to(state[name].dtype)
    return state


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name belongs to an adapter."""
    return ".lora_" in name


def base_name(name: str) -> str:
    """Return the name that a parameter or a module had before adapters were put around it."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


def layers_of(model: PreTrainedModel) -> torch.nn.ModuleList:
    """Return the model's layers; ModelError where they are not found."""
    layers = find_layers(model)
    if layers is None:
        count = model.config.get_text_config().num_hidden_layers
        raise ModelError(
            f"{model.name_or_path}: its {count} layers were not found, so it can only be trained as a whole; leave lora and "
            "trainable_layers out"
        )
    return layers


def is_linear_map(module: torch.nn.Module) -> bool:
    """Return whether a module multiplies by its weight and does nothing else; some routers are linear maps that do more."""
    if type(module).forward in (torch.nn.Linear.forward, Conv1D.forward):
        return True
    return isinstance(module, torch.nn.Linear) and _is_plain_product(module)


@torch.no_grad()
def _is_plain_product(module: torch.nn.Linear) -> bool:
    """Return whether a forward pass of a class's own (Falcon's) is that of its base class, on one input."""
    stand_ins = {
        name: _ramp(parameter.shape) for name, parameter in module.named_parameters(recurse=False)
    }
    probe = _ramp((1, module.in_features))
    result = torch.func.functional_call(module, stand_ins, (probe,))
    expected = torch.nn.functional.linear(probe, stand_ins["weight"], stand_ins.get("bias"))
    return (
        isinstance(result, Tensor)
        and result.shape == expected.shape
        and torch.allclose(result, expected)
    )


def _ramp(shape: tuple[int, ...]) -> Tensor:
    return torch.linspace(-1.0, 1.0, math.prod(shape)).reshape(shape)


def expert_weights(module: torch.nn.Module) -> list[str]:
    """Return the names of the weights in which a module holds all experts, [experts, ., .]; none where it is no experts."""
    if not type(module).__name__.endswith("Experts"):
        return []
    return sorted(
        name for name, weight in module.named_parameters(recurse=False) if weight.ndim == 3
    )


def weights_of_experts(model: PreTrainedModel) -> Iterator[tuple[torch.nn.Parameter, int]]:
    """Yield the weights that hold a part for each of several experts, adapters included, each with how many experts there are."""
    for module in model.modules():
        for name in expert_weights(module):
            weight = module.get_parameter(name)
            yield weight, len(weight)
        if isinstance(module, ExpertAdapter):
            for low_rank in (module.lora_A, module.lora_B):
                yield low_rank.get_parameter(f"{SET}.weight"), module.num_experts


def _is_within(name: str, layers: list[int], parts: tuple[str, ...]) -> bool:
    """Return whether a module of the list of layers is in one of these layers and halves."""
    number, _, inner = name.partition(".")
    part = "attention" if any(mixer in inner for mixer in MIXERS) else "mlp"
    return bool(inner) and int(number) in layers and part in parts


def _read_past_adapters(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the maps whose weights a module hands to a kernel, which would not see an adapter around them.

    A state-space mixer does so with all but its first map, on machines that have its kernels.
    """
    if not {"A_log", "D"} <= {name for name, _ in module.named_parameters(recurse=False)}:
        return []
    return [inner for name, inner in module.named_children() if name != "in_proj"]


def _around_map(module: torch.nn.Module, lora: Lora) -> Linear:
    transposed = isinstance(module, Conv1D)
    settings = LoraConfig(fan_in_fan_out=transposed)
    return Linear(module, SET, settings, lora.rank, lora.alpha, is_target_conv_1d_layer=transposed)  # type: ignore[arg-type]


def _around_experts(module: torch.nn.Module, weight: str, lora: Lora) -> ExpertAdapter:
    return ExpertAdapter(module, SET, weight, LoraConfig(), lora.rank, lora.alpha)  # type: ignore[arg-type]


def _adapted_weights(model: PreTrainedModel) -> Iterator[tuple[str, LoraLayer]]:
    """Each adapter with the name of the weight it adapts."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            weight = module.parameter_name if isinstance(module, ParamWrapper) else "weight"
            yield f"{base_name(name)}.{weight}", module


def _check_mergeable(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Raise ModelError unless `merged_weights` would give weights of these names: better now than after the training."""
    kept = {base_name(name) for name in model.state_dict() if not is_adapter(name)}
    adapted = {name for name, _ in _adapted_weights(model)}
    strange = sorted((kept ^ set(names)) | (adapted - kept))
    if strange:
        raise ModelError(
            f"{model.name_or_path}: its adapters could not be exported, for {strange[0]} is not a weight of the model; leave "
            "lora out to train the weights themselves"
        )
