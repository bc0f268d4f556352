"""Fix length-dependent rotary frequencies once for all texts of a run.

transformers chooses the frequencies of `longrope` (arXiv 2402.13753) and `dynamic` rotations by the
longest text of a batch, and partly keeps them for later batches. A text's log-probabilities would
then depend on its batch, and the text would be sampled and scored with different frequencies. Here
all texts of a run use the frequencies of its longest text, as in vLLM, which uses `max_model_len`.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LONGROPE, DYNAMIC = "longrope", "dynamic"
FIXED = "default"
"""The kind of a fixed rotation: transformers does not change its frequencies."""


def fix_rotations(model: PreTrainedModel, longest: int) -> int | None:
    """Fix frequencies that depend on length for texts of up to `longest` tokens.

    Returns the longest text that these frequencies serve; None if no frequency depends on length.
    """
    limits: list[int] = []
    for module in model.modules():
        for part, kind in list(_list_kinds(module)):
            prefix = "" if part is None else f"{part}_"
            layer = {} if part is None else {"layer_type": part}
            device = module.get_buffer(f"{prefix}inv_freq").device
            rotary: Any = module
            frequencies, _ = ROPE_INIT_FUNCTIONS[kind](
                rotary.config, device, seq_len=longest, **layer
            )
            module.register_buffer(f"{prefix}inv_freq", frequencies, persistent=False)
            limits.append(_find_limit(rotary.config, part, kind, longest))
            if part is None:
                rotary.rope_type = FIXED
                rotary.config = _fix_scale(rotary.config, longest)
            else:
                rotary.rope_type = {**rotary.rope_type, part: FIXED}
    return min(limits, default=None)


def find_stretched_length(config: PreTrainedConfig) -> int | None:
    """Return the longest text of a model with a `dynamic` rotation; None for any other model.

    Its `max_position_embeddings` is the length before the rotation is stretched, as in vLLM.
    """
    rotation = config.to_dict().get("rope_parameters") or {}
    if rotation.get("rope_type") != DYNAMIC:
        return None
    return int(config.max_position_embeddings * rotation.get("factor", 1.0))


def _list_kinds(module: torch.nn.Module) -> Iterator[tuple[str | None, str]]:
    """Yield the length-dependent kinds of a rotation, with the layer type if there are several."""
    kinds = vars(module).get("rope_type")
    by_part = kinds if isinstance(kinds, dict) else {None: kinds}
    yield from ((part, kind) for part, kind in by_part.items() if kind in (LONGROPE, DYNAMIC))


def _fix_scale(config: Any, longest: int) -> Any:
    """Return a config with one scale of the angles' cosines and sines for all lengths (PhiMoE)."""
    rotation = config.rope_parameters
    if "long_mscale" not in rotation:
        return config
    is_long = longest > rotation["original_max_position_embeddings"]
    scale = rotation["long_mscale" if is_long else "short_mscale"]
    # A copy, because the model's own config is exported.
    fixed = copy.deepcopy(config)
    fixed.rope_parameters = {**rotation, "long_mscale": scale, "short_mscale": scale}
    return fixed


def _find_limit(config: Any, part: str | None, kind: str, longest: int) -> int:
    """Return the longest text that has the same frequencies as a text of `longest` tokens."""
    rotation = config.rope_parameters if part is None else config.rope_parameters[part]
    if kind == DYNAMIC:
        return max(longest, config.max_position_embeddings)
    original = rotation["original_max_position_embeddings"]
    return original if longest <= original else max(longest, config.max_position_embeddings)
