"""The drafter of EAGLE-3 (arXiv 2503.01840): one decoder layer over three of the target's states.

Its parameters have the names of SpecForge's `LlamaForCausalLMEagle3`
(specforge/modeling/draft/llama3_eagle.py).
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from practicum.errors import ModelError, RecipeError
from practicum.functional.head import Head
from practicum.models.config import DrafterConfig
from practicum.ports.drafters import DraftModel, DraftVocabulary, KeysAndValues, choose_layers

SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
)
"""The sizes of the target that its drafter shares."""

LAYOUTS = {"speculators": "layers.0.", "sglang": "midlayer."}
"""The prefix of the decoder layer's tensors in each layout."""


class _DraftLayer(torch.nn.Module):
    """The decoder layer; its attention reads an embedding next to a state."""

    def __init__(self, shape: LlamaConfig) -> None:
        super().__init__()
        width, head = shape.hidden_size, _get_head_size(shape)
        query, key = shape.num_attention_heads * head, _count_groups(shape) * head
        self.self_attn = torch.nn.ModuleDict(
            {
                "q_proj": torch.nn.Linear(2 * width, query, bias=False),
                "k_proj": torch.nn.Linear(2 * width, key, bias=False),
                "v_proj": torch.nn.Linear(2 * width, key, bias=False),
                "o_proj": torch.nn.Linear(query, width, bias=False),
            }
        )
        self.mlp = LlamaMLP(shape)
        self.hidden_norm = LlamaRMSNorm(width, eps=shape.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(width, eps=shape.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(width, eps=shape.rms_norm_eps)


class Eagle3(DraftModel):
    """See `practicum.ports.drafters.DraftModel`."""

    def __init__(
        self, shape: LlamaConfig, vocabulary: DraftVocabulary, layers: tuple[int, ...]
    ) -> None:
        super().__init__()
        width = shape.hidden_size
        self.shape, self.vocabulary, self.layers = shape, vocabulary, layers
        self.fc = torch.nn.Linear(len(layers) * width, width, bias=False)
        self.midlayer = _DraftLayer(shape)
        self.norm = LlamaRMSNorm(width, eps=shape.rms_norm_eps)
        self.lm_head = torch.nn.Linear(width, len(vocabulary.ids), bias=False)
        self.rotary = LlamaRotaryEmbedding(shape)

    @property
    def head(self) -> Head:
        """The head over the draft vocabulary."""
        return Head(self.lm_head.weight, len(self.vocabulary.ids))

    def fuse(self, features: Float[Tensor, "B L F"]) -> Float[Tensor, "B L D"]:
        """Map the target's states to one state."""
        return self.fc(features)

    def read(
        self,
        embeddings: Float[Tensor, "B L D"],
        hidden: Float[Tensor, "B L D"],
        positions: Int[Tensor, "B L"],
    ) -> tuple[Float[Tensor, "B H L d"], KeysAndValues]:
        """Return queries, keys and values of the normalised embedding next to the normalised state."""
        layer, size = self.midlayer, _get_head_size(self.shape)
        both = torch.cat([layer.input_layernorm(embeddings), layer.hidden_norm(hidden)], dim=-1)
        queries, keys, values = (
            layer.self_attn[name](both).unflatten(-1, (-1, size)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        queries, keys = apply_rotary_pos_emb(queries, keys, *self.rotary(both, positions))
        return queries, (keys, values)

    def attend(
        self,
        hidden: Float[Tensor, "B L D"],
        queries: Float[Tensor, "B H L d"],
        memory: KeysAndValues,
        mask: Bool[Tensor, "#B L R"],
        path: Sequence[KeysAndValues] = (),
    ) -> Float[Tensor, "B L D"]:
        """Return the layer's output; the state itself, not its norm, is the residual stream."""
        layer, (keys, values) = self.midlayer, self._repeat(memory)
        pairs = [self._repeat(pair) for pair in path]
        smallest = torch.finfo(queries.dtype).min
        scores = (queries @ keys.transpose(-1, -2)).masked_fill(~mask[:, None], smallest)
        deeper = [(queries * key).sum(dim=-1, keepdim=True) for key, _ in pairs]
        scores = torch.cat([scores, *deeper], dim=-1) / math.sqrt(_get_head_size(self.shape))
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(queries)
        rows = keys.shape[2]
        mixed = weights[..., :rows] @ values
        for number, (_, value) in enumerate(pairs, start=rows):
            mixed = mixed + weights[..., number, None] * value
        hidden = hidden + layer.self_attn["o_proj"](mixed.transpose(1, 2).flatten(2))
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def finish(self, state: Float[Tensor, "*s D"]) -> Float[Tensor, "*s D"]:
        """Return the norm of the state; the next depth reads the state without it."""
        return self.norm(state)

    def _repeat(self, pair: KeysAndValues) -> KeysAndValues:
        """Return keys and values once per query head."""
        groups = self.shape.num_attention_heads // _count_groups(self.shape)
        keys, values = pair
        return keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)


def _get_head_size(shape: LlamaConfig) -> int:
    return shape.head_dim or shape.hidden_size // shape.num_attention_heads


def _count_groups(shape: LlamaConfig) -> int:
    return shape.num_key_value_heads or shape.num_attention_heads


def build(target: Any, config: DrafterConfig, vocabulary: DraftVocabulary, seed: int) -> Eagle3:
    """Make a new drafter; its head begins as the target's rows of the draft vocabulary."""
    described = target.config.get_text_config()
    layers = choose_layers(config.layers, described.num_hidden_layers)
    drafter = Eagle3(_describe(described), vocabulary, layers)
    stream = torch.Generator().manual_seed(seed)
    head = target.get_output_embeddings().weight.detach().float().cpu()
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.02, generator=stream)
        drafter.lm_head.weight.copy_(head[vocabulary.ids])
    return drafter


def _describe(target: Any) -> LlamaConfig:
    """Return the sizes of the drafter of a target."""
    described = target.to_dict()
    sizes = {name: described[name] for name in SHAPE if described.get(name) is not None}
    heads = sizes["num_attention_heads"]
    sizes.setdefault("head_dim", sizes["hidden_size"] // heads)
    sizes.setdefault("num_key_value_heads", heads)
    rope = sizes.get("rope_parameters")
    if rope is not None and "rope_type" not in rope:  # one per kind of layer, as in Gemma 3
        sizes["rope_parameters"] = rope.get("full_attention", {"rope_type": "default"})
    return LlamaConfig(
        **sizes, num_hidden_layers=1, attention_bias=False, tie_word_embeddings=False
    )


def write(drafter: Eagle3, folder: Path, layout: str, target: Any, depth: int) -> None:
    """Write `config.json` and `model.safetensors` in the layout `speculators` or `sglang`.

    The tensors have the names of Speculators 0.9 (src/speculators/models/eagle3/core.py), or of
    SpecForge. The target's embedding is written too. Raises RecipeError for another layout.
    """
    if layout not in LAYOUTS:
        raise RecipeError(f"--format {layout}: a drafter is written as {' or '.join(LAYOUTS)}")
    vocabulary, sizes = drafter.vocabulary, drafter.shape.to_diff_dict()
    sizes |= {"vocab_size": vocabulary.size, "num_hidden_layers": 1, "model_type": "llama"}
    embedding = target.get_input_embeddings().weight.detach().float()
    tensors = {name: weight.detach() for name, weight in drafter.named_parameters()}
    tensors["embed_tokens.weight"] = embedding
    if layout == "sglang" or len(vocabulary.ids) < vocabulary.size:
        tensors |= {"t2d": vocabulary.t2d, "d2t": vocabulary.d2t}  # Speculators: of a part alone
    layer = LAYOUTS[layout]
    tensors = {
        name.replace("midlayer.", layer): tensor.cpu().contiguous()
        for name, tensor in tensors.items()
    }
    described = _describe_folder(drafter, layout, sizes, target, depth)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")


def _describe_folder(
    drafter: Eagle3, layout: str, sizes: dict[str, Any], target: Any, depth: int
) -> dict[str, Any]:
    """Return the contents of `config.json`."""
    count, layers = len(drafter.vocabulary.ids), list(drafter.layers)
    if layout == "sglang":
        # SGLang numbers a state by the layer that computes it, so its numbers are smaller by one.
        numbers = [layer - 1 for layer in layers]
        return {
            **sizes,
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": count,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": numbers},
        }
    proposal = {"proposal_type": "greedy", "speculative_tokens": depth, "verifier_accept_k": 1}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": count,
        "norm_before_residual": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": layers,
        "transformer_layer_config": sizes,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "accept_tolerance": 0.0}],
            "verifier": {
                "name_or_path": target.name_or_path,
                "architectures": list(target.config.architectures or [type(target).__name__]),
            },
        },
    }


def read(folder: Path, target: Any) -> Eagle3:
    """Read a drafter's folder of either layout; ModelError if it is for another target."""
    try:
        described = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: no drafter can be read ({error}); export it again") from error
    sizes = described.get("transformer_layer_config", described)
    layers = described.get("eagle_aux_hidden_state_layer_ids")
    numbers = described.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    if layers is None and numbers is not None:
        layers = [number + 1 for number in numbers]
    text = target.config.get_text_config()
    rows = target.get_input_embeddings().weight.shape
    if (sizes.get("vocab_size"), sizes.get("hidden_size")) != tuple(rows):
        raise ModelError(
            f"{folder}: the drafter is for a target of {sizes.get('vocab_size')} tokens and width "
            f"{sizes.get('hidden_size')}, and this target has {rows[0]} and {rows[1]}; use the "
            "target that it was trained for"
        )
    embedding = tensors.pop("embed_tokens.weight", None)
    weight = target.get_input_embeddings().weight.detach().float().cpu()
    if embedding is not None and not torch.allclose(
        embedding.float(), weight, atol=0.02, rtol=0.02
    ):
        raise ModelError(
            f"{folder}: the drafter has the embedding of another target; use the target that it "
            "was trained for"
        )
    full = torch.ones(rows[0], dtype=torch.bool)
    t2d, d2t = tensors.pop("t2d", full), tensors.pop("d2t", None)
    d2t = torch.zeros(int(t2d.sum()), dtype=torch.long) if d2t is None else d2t
    vocabulary = DraftVocabulary.from_buffers(t2d, d2t, str(folder))
    shape = _describe(LlamaConfig(**sizes))
    drafter = Eagle3(shape, vocabulary, choose_layers(layers, text.num_hidden_layers))
    weights = {name.replace("layers.0.", "midlayer."): weight for name, weight in tensors.items()}
    problems = drafter.load_state_dict(weights, strict=False)
    missing = [name for name in problems.missing_keys if not name.startswith("rotary")]
    if missing or problems.unexpected_keys:
        name = (missing + problems.unexpected_keys)[0]
        raise ModelError(f"{folder}: {name} is missing or unknown; export the drafter again")
    return drafter.float()
