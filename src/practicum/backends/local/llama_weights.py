"""Find the weights of Llama-like bodies by their names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from practicum.backends.local.language_model import LanguageModel, find_body
from practicum.backends.local.prepared import list_linear_maps
from practicum.backends.local.quantising import is_packed

STATIC_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})
"""The kinds of rotary embedding with angles that do not depend on the length of the text."""

KNOWN_LAYER_SETTINGS = {"layer_types": {"full_attention", "sliding_attention"}}
"""The settings that may differ between layers, with the values that the programs support.

The programs only read texts within the shortest window, where both types of layer give the same
result.
"""

MAPS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
NORMS = ("input_layernorm", "post_attention_layernorm")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
BIASED = MAPS[:4]
"""The maps that may have a bias: Qwen2 has three."""

DOWN, UP = "adapter_down", "adapter_up"
"""The names of the two factors of a map's adapter, the second one scaled."""


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """The current weights of a Llama-like body by name in each layer, and its sizes.

    L layers of H query heads in G groups, each head d wide, over states that are D wide.
    """

    layers: list[Mapping[str, Tensor]]
    embedding: Float[Tensor, "V D"]
    final_norm: Float[Tensor, " D"]
    heads: int
    groups: int
    head_width: int
    inner: int
    epsilon: float


@torch.no_grad()
def find_llama_weights(model: PreTrainedModel, *, merge: bool = True) -> LlamaWeights | None:
    """Return the weights of a model if its body has Llama's parameter names, or None.

    Queries, keys, values and outputs may have biases (Qwen2), and queries and keys a norm of each
    head (Qwen3). Matching names are not enough: a trial decides whether the programs compute the
    model (see `practicum.backends.local.trial`). Layers that differ in unknown settings are
    refused. Adapters are added to the weights that they adapt; without `merge`, their factors are
    returned separately.
    """
    config: Any = model.config.get_text_config()
    if not _has_known_layers(config):
        return None
    body = find_body(model)
    weights = _merge_adapters(body) if merge else _separate_adapters(body)
    # The decode steps cannot read quantized weights.
    if any(map(is_packed, weights.values())):
        return None
    expected = {"embed_tokens.weight", "norm.weight"}
    layers: list[Mapping[str, Tensor]] = []
    for number in range(config.num_hidden_layers):
        prefix = f"layers.{number}."
        layer = {
            key.removeprefix(prefix): w for key, w in weights.items() if key.startswith(prefix)
        }
        required = {f"{name}.weight" for name in (*MAPS, *NORMS)}
        optional = {f"{name}.weight" for name in HEAD_NORMS} | {f"{name}.bias" for name in BIASED}
        optional |= {f"{name}.{part}" for name in MAPS for part in (DOWN, UP)}
        if not required <= layer.keys() <= required | optional:
            return None
        expected |= {prefix + key for key in layer}
        layers.append(layer)
    rotation = (config.to_dict().get("rope_parameters") or {}).get("rope_type")
    if weights.keys() != expected or rotation not in STATIC_ROTATIONS:
        return None
    heads, first = config.num_attention_heads, layers[0]
    head_width = len(first["self_attn.q_proj.weight"]) // heads
    # The step rotates full heads: it would read past the end of a table for partial rotations
    # (GLM).
    frequencies = dict(body.named_buffers()).get("rotary_emb.inv_freq")
    if frequencies is None or 2 * len(frequencies) != head_width:
        return None
    return LlamaWeights(
        layers=layers,
        embedding=weights["embed_tokens.weight"],
        final_norm=weights["norm.weight"],
        heads=heads,
        groups=len(first["self_attn.k_proj.weight"]) // head_width,
        head_width=head_width,
        inner=len(first["mlp.gate_proj.weight"]),
        epsilon=config.to_dict().get("rms_norm_eps", 0.0),
    )


def list_layer_settings(config: Any) -> dict[str, list[Any]]:
    """Return the settings for which a config lists a value per layer, by name."""
    layers = config.num_hidden_layers
    return {
        name: list(values[:layers])
        for name, values in config.to_dict().items()
        if isinstance(values, list | tuple)
        and len(values) >= layers
        and not name.endswith("token_id")
    }


def _has_known_layers(config: Any) -> bool:
    """Return False if layers differ in a setting that the programs do not know."""
    for name, values in list_layer_settings(config).items():
        is_constant = all(value == values[0] for value in values)
        if not is_constant and not set(values) <= KNOWN_LAYER_SETTINGS.get(name, set()):
            return False
    return True


def compute_rotations(
    language_model: LanguageModel, head_width: int, longest: int, dtype: torch.dtype
) -> tuple[Float[Tensor, "M h"], Float[Tensor, "M h"]]:
    """Return the cosines and sines of each position's rotation; h is half the width of a head."""
    rotary: Any = find_body(language_model.model).get_submodule("rotary_emb")
    device = language_model.device
    cosines, sines = rotary(
        torch.zeros(1, 1, head_width, dtype=dtype, device=device),
        torch.arange(longest, device=device)[None],
    )
    # Each angle occurs twice, once for each half of a head.
    half = head_width // 2
    return cosines[0, :, :half].contiguous(), sines[0, :, :half].contiguous()


def _merge_adapters(body: torch.nn.Module) -> dict[str, Tensor]:
    """Return the weights by name, with each adapter added to the weight that it adapts.

    A map with an adapter that cannot be added keeps names that no plain model has.
    """
    names = {module: name for name, module in body.named_modules()}
    merged: dict[str, Tensor] = {}
    inside: set[str] = set()
    for module, weight, bias in list_linear_maps(body):
        inside |= {f"{names[module]}.{key}" for key, _ in module.named_parameters()}
        merged[f"{names[module]}.weight"] = weight
        if bias is not None:
            merged[f"{names[module]}.bias"] = bias
    unmerged = {key: w.detach() for key, w in body.named_parameters() if key not in inside}
    return merged | unmerged


def _separate_adapters(body: torch.nn.Module) -> dict[str, Tensor]:
    """Return the weights by name, with the factors of each map's adapters as separate entries.

    A map with an adapter of another kind keeps names that no plain model has.
    """
    weights = {name: weight.detach() for name, weight in body.named_parameters()}
    if not any(".lora_A." in name for name in weights):
        return weights
    from peft.tuners.lora import Linear

    adapted = {name: layer for name, layer in body.named_modules() if isinstance(layer, Linear)}
    for name, layer in adapted.items():
        if layer.lora_variant:
            continue
        base = layer.get_base_layer()
        adapters = layer.active_adapters
        if type(base) is not torch.nn.Linear or any(layer.lora_bias[key] for key in adapters):
            continue
        weights = {key: w for key, w in weights.items() if not key.startswith(f"{name}.")}
        weights |= {f"{name}.{key}": weight.detach() for key, weight in base.named_parameters()}
        factors = dict(layer.named_parameters())
        downs = [factors[f"lora_A.{key}.weight"].detach() for key in adapters]
        ups = [factors[f"lora_B.{key}.weight"].detach() * layer.scaling[key] for key in adapters]
        weights |= {f"{name}.{DOWN}": torch.cat(downs), f"{name}.{UP}": torch.cat(ups, dim=1)}
    return weights
