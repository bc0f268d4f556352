"""Build a tiny model with a model's class and settings, to try the compiled programs on.

Its layers have every combination of per-layer settings in the config. Each number of tokens at
which the config changes what a layer computes is so small that short texts cross it.
"""

import copy
import json
from typing import Any

import torch
from transformers import PreTrainedModel

from practicum.backends.local.language_model import Decoding, LanguageModel
from practicum.backends.local.llama_weights import list_layer_settings
from practicum.backends.local.packing import enable_packing

VOCABULARY = 64
"""The vocabulary size of a twin."""

FEWEST_LAYERS = 2
HEAD_WIDTH = 8
SHORT, ENDLESS = 4, 1 << 20
"""A number of tokens that every trial crosses, and a number that no trial crosses."""

WINDOWS = frozenset({"sliding_window", "attention_chunk_size"})
"""The settings that limit how far a layer sees."""

THRESHOLDS = frozenset({"original_max_position_embeddings", "floor_scale"})
"""Other settings with a number of tokens at which a layer starts to compute differently."""

ROTATION_FACTORS = frozenset({"short_factor", "long_factor"})
"""Settings of a rotation with a number for each frequency."""


def build_twin(
    model: PreTrainedModel,
    decoding: Decoding,
    *,
    head_width: int = HEAD_WIDTH,
    window: int = ENDLESS,
) -> LanguageModel:
    """Return a tiny float32 model with random weights and the given implementation of decoding.

    `window` replaces the window of each layer that does not see the full text.
    """
    modules = shrink(model, head_width, window)
    return enable_packing(LanguageModel(modules, VOCABULARY, decoding=decoding))


def identify_twin(model: PreTrainedModel) -> tuple[type[PreTrainedModel], str]:
    """Return the class and the settings of a model's twin; two models may have the same twin."""
    config = _shrink_config(model, HEAD_WIDTH, ENDLESS)
    return type(model), json.dumps(config.to_dict(), sort_keys=True, default=str)


def shrink(
    model: PreTrainedModel, head_width: int = HEAD_WIDTH, window: int = ENDLESS
) -> PreTrainedModel:
    """Return the modules of a twin; see `build_twin`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        twin = type(model)(_shrink_config(model, head_width, window))
        for weight in twin.parameters():
            if weight.dim() == 1:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(std=weight.shape[1] ** -0.5)
    return twin.eval()


def _shrink_config(model: PreTrainedModel, head_width: int, window: int) -> Any:
    """Return a copy of the config with small sizes and short thresholds."""
    config: Any = copy.deepcopy(model.config)
    groups = max(config.num_attention_heads // config.num_key_value_heads, 1)
    layers = _choose_layers(model)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": HEAD_WIDTH * groups,
        "num_attention_heads": 2 * groups,
        "num_key_value_heads": 2,
        "head_dim": head_width,
        "intermediate_size": 24,
        "num_hidden_layers": len(layers),
        "pad_token_id": None,
    }
    for name, values in list_layer_settings(config).items():
        sizes[name] = [values[number] for number in layers]
    described = config.to_dict()
    sizes |= {name: window for name in WINDOWS if described.get(name)}
    sizes |= {name: SHORT for name in THRESHOLDS if described.get(name)}
    if described.get("rope_parameters"):
        sizes["rope_parameters"] = _shorten(described["rope_parameters"], head_width)
    for name, size in sizes.items():
        setattr(config, name, size)
    return config


def _choose_layers(model: PreTrainedModel) -> list[int]:
    """Choose the first layer of each kind in the config, and more up to the minimum number."""
    config: Any = model.config
    count = config.num_hidden_layers
    settings = list_layer_settings(config).values()
    kinds = [tuple(repr(values[number]) for values in settings) for number in range(count)]
    first = [number for number, kind in enumerate(kinds) if kind not in kinds[:number]]
    repeated = [number for number in range(count) if number not in first]
    return sorted(first + repeated[: max(FEWEST_LAYERS - len(first), 0)])


def _shorten(rotation: dict[str, Any], head_width: int) -> dict[str, Any]:
    """Return the settings of a rotation, or of one for each type of layer, with short thresholds."""
    shortened = dict(rotation)
    for name, setting in rotation.items():
        if isinstance(setting, dict):
            shortened[name] = _shorten(setting, head_width)
        elif name in THRESHOLDS and setting:
            shortened[name] = SHORT
        elif name in ROTATION_FACTORS:
            shortened[name] = setting[: head_width // 2]
    return shortened
