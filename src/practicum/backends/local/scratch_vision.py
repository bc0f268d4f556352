"""The part of a from-scratch model that reads pictures: its config, its token, and its processor's files."""

import json
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    CLIPImageProcessorPil,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from practicum.models.config import ScratchConfig

TOKEN = "<picture>"

SIDE, PATCH = 32, 8
"""The pixels on each side of a resized picture and of a patch: 16 tokens."""


def describe_model(
    config: ScratchConfig, tokenizer: PreTrainedTokenizerBase, text: dict[str, Any]
) -> PretrainedConfig:
    """Return the config of a model of text and pictures with one layer for pictures, of the same width."""
    return AutoConfig.for_model(
        "llava",
        text_config={"model_type": "llama", **text},
        vision_config={
            "model_type": "clip_vision_model",
            "image_size": SIDE,
            "patch_size": PATCH,
            "hidden_size": config.hidden_size,
            "intermediate_size": 2 * config.hidden_size,
            # The states of the last layer but one are read.
            "num_hidden_layers": 2,
            "num_attention_heads": config.heads,
            # With the default scale a tiny model does not learn to see.
            "initializer_range": 0.2,
        },
        image_token_index=tokenizer.convert_tokens_to_ids(TOKEN),
    )


def write_processor(folder: Path) -> None:
    """Write the files of the processor of pictures into a model's folder."""
    sides = {"height": SIDE, "width": SIDE}
    CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=sides).save_pretrained(folder)
    settings = {
        "image_token": TOKEN,
        "patch_size": PATCH,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    (folder / "processor_config.json").write_text(json.dumps(settings))
