"""Find the weights of Llama-like bodies by their names, adapters merged."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from practicum.backends.local.language_model import find_body
from practicum.backends.local.prepared import list_linear_maps

STATIC_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})
"""The kinds of rotary embedding whose angles do not depend on the length of the text."""

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


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """The current weights of a Llama-like body, and its sizes.

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
def find_llama_weights(model: PreTrainedModel) -> LlamaWeights | None:
    """Return the weights of a model whose body's parameters have the names of Llama's, or None.

    Queries, keys, values and outputs may have biases (Qwen2), and queries and keys a norm of each
    head (Qwen3). What names do not show, such as a multiplier, is for a trial to find.
    """
    config: Any = model.config.get_text_config()
    merged = _merge_adapters(find_body(model))
    expected = {"embed_tokens.weight", "norm.weight"}
    layers: list[Mapping[str, Tensor]] = []
    for number in range(config.num_hidden_layers):
        prefix = f"layers.{number}."
        layer = {key.removeprefix(prefix): w for key, w in merged.items() if key.startswith(prefix)}
        required = {f"{name}.weight" for name in (*MAPS, *NORMS)}
        optional = {f"{name}.weight" for name in HEAD_NORMS} | {f"{name}.bias" for name in BIASED}
        if not required <= layer.keys() <= required | optional:
            return None
        expected |= {prefix + key for key in layer}
        layers.append(layer)
    rotation = (config.to_dict().get("rope_parameters") or {}).get("rope_type")
    if merged.keys() != expected or rotation not in STATIC_ROTATIONS:
        return None
    heads, first = config.num_attention_heads, layers[0]
    head_width = len(first["self_attn.q_proj.weight"]) // heads
    return LlamaWeights(
        layers=layers,
        embedding=merged["embed_tokens.weight"],
        final_norm=merged["norm.weight"],
        heads=heads,
        groups=len(first["self_attn.k_proj.weight"]) // head_width,
        head_width=head_width,
        inner=len(first["mlp.gate_proj.weight"]),
        epsilon=config.to_dict().get("rms_norm_eps", 0.0),
    )


def _merge_adapters(body: torch.nn.Module) -> dict[str, Tensor]:
    """Return the weights by name, with each adapter added to the weight that it adapts.

    A map whose adapter cannot be added keeps names that no plain model has.
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
