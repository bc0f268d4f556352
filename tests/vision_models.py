"""Tiny vision-language models of each family, built from their configs with their own processors.

With `published`, pictures are read as by a published model of the family: with its sizes of pictures,
patches and tiles, from the same contents of `preprocessor_config.json`. Only widths and depths are tiny.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerBase

from practicum.text.from_scratch import build_character_tokenizer

FAMILIES = (
    "llava",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "idefics3",
    "smolvlm",
    "internvl",
    "gemma3",
)

_SIDE, _PATCH = 56, 14
_TOKENS = {
    "llava": {"image_token": "<image>"},
    "qwen2_5_vl": {
        "vision_start": "<|vision_start|>",
        "vision_end": "<|vision_end|>",
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
    },
    "idefics3": {
        "image_token": "<image>",
        "fake": "<fake_token_around_image>",
        "whole": "<global-img>",
        "row": "<row_1_col_1>",
        "end": "<end_of_utterance>",
    },
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
    "gemma3": {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    },
}
_TOKENS["qwen2_vl"] = _TOKENS["qwen3_vl"] = _TOKENS["qwen2_5_vl"]
_TOKENS["idefics3"] |= {
    f"row_{row}_{column}": f"<row_{row}_col_{column}>"
    for row in range(1, 5)
    for column in range(1, 5)
    if (row, column) != (1, 1)
}
_TOKENS["smolvlm"] = _TOKENS["idefics3"]

_QWEN2 = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
_QWEN3 = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


@dataclass(frozen=True)
class Published:
    """How a published model reads pictures; `tokens` are the placeholders of one of 640 x 480 pixels."""

    name: str
    side: int
    patch: int
    reader: Mapping[str, Any]
    processor: Mapping[str, Any]
    tokens: int


PUBLISHED = {
    "llava": Published(
        "llava-hf/llava-1.5-7b-hf",
        336,
        14,
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 336},
            "crop_size": {"height": 336, "width": 336},
        },
        {
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        24 * 24,
    ),
    # Multiples of 28: 644 x 476.
    "qwen2_vl": Published("Qwen/Qwen2-VL-2B-Instruct", 0, 14, _QWEN2, {}, 23 * 17),
    "qwen2_5_vl": Published("Qwen/Qwen2.5-VL-3B-Instruct", 0, 14, _QWEN2, {}, 23 * 17),
    "qwen3_vl": Published("Qwen/Qwen3-VL-2B-Instruct", 0, 16, _QWEN3, {}, 20 * 15),
    # 4 x 3 tiles and the whole picture.
    "idefics3": Published(
        "HuggingFaceM4/Idefics3-8B-Llama3",
        364,
        14,
        {
            "image_processor_type": "Idefics3ImageProcessor",
            "do_image_splitting": True,
            "size": {"longest_edge": 1456},
            "max_image_size": {"longest_edge": 364},
        },
        {"image_seq_len": 169},
        13 * 169,
    ),
    "smolvlm": Published(
        "HuggingFaceTB/SmolVLM2-256M-Video-Instruct",
        512,
        16,
        {
            "image_processor_type": "SmolVLMImageProcessor",
            "do_image_splitting": True,
            "size": {"longest_edge": 2048},
            "max_image_size": {"longest_edge": 512},
        },
        {"image_seq_len": 64},
        13 * 64,
    ),
    "internvl": Published(
        "OpenGVLab/InternVL3-1B-hf",
        448,
        14,
        {
            "image_processor_type": "GotOcr2ImageProcessorFast",
            "crop_to_patches": False,
            "min_patches": 1,
            "max_patches": 12,
            "size": {"height": 448, "width": 448},
        },
        {"image_seq_length": 256},
        13 * 256,
    ),
    "gemma3": Published(
        "google/gemma-3-4b-it",
        896,
        14,
        {
            "image_processor_type": "Gemma3ImageProcessor",
            "do_pan_and_scan": None,
            "size": {"height": 896, "width": 896},
            "image_seq_length": 256,
        },
        {"image_seq_length": 256},
        256,
    ),
}
_PLACES = {
    "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "internvl": "<IMG_CONTEXT>",
    "gemma3": "<start_of_image>",
}
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 ?.,:=\n"


def build_vision_model(
    folder: Path, family: str, seed: int = 0, published: Published | None = None
) -> Path:
    """Write a model of random weights with its tokenizer and processor; return the folder."""
    tokenizer = build_character_tokenizer(ALPHABET)
    names = _TOKENS[family]
    tokenizer.add_special_tokens({"additional_special_tokens": list(names.values())})
    tokenizer.init_kwargs["extra_special_tokens"] = {
        key: token for key, token in names.items() if key.endswith("token")
    }
    for key, token in names.items():
        if key.endswith("token"):
            tokenizer._special_tokens_map[key] = token
            tokenizer.SPECIAL_TOKENS_ATTRIBUTES = [*tokenizer.SPECIAL_TOKENS_ATTRIBUTES, key]
    tokenizer.chat_template = _write_template(_PLACES.get(family, "<image>"), family)
    config = AutoConfig.for_model(family, **_describe(family, tokenizer, published))
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        # The default scale leaves a tiny model's logits nearly flat, and Gemma begins with a map of zeros.
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.copy_(4 * weight if weight.any() else torch.randn_like(weight) / 10)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = _SETTINGS.get(family, {}) if published is None else published.processor
    (folder / "processor_config.json").write_text(json.dumps(settings))
    if published is None:
        _open_image_processor(family).save_pretrained(folder)
    else:
        (folder / "preprocessor_config.json").write_text(json.dumps(published.reader))
    return folder


_SETTINGS: dict[str, dict[str, Any]] = {
    "llava": {
        "patch_size": _PATCH,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    },
    "idefics3": {"image_seq_len": 4},
    "smolvlm": {"image_seq_len": 4},
    "internvl": {"image_seq_length": 4},
    "gemma3": {"image_seq_length": 4},
}


def _open_image_processor(family: str) -> Any:
    size = {"height": _SIDE, "width": _SIDE}
    match family:
        case "llava":
            return transformers.CLIPImageProcessorPil(size={"shortest_edge": _SIDE}, crop_size=size)
        case "idefics3" | "smolvlm":
            is_smol = family == "smolvlm"
            opener: Any = (
                transformers.SmolVLMImageProcessorPil
                if is_smol
                else transformers.Idefics3ImageProcessorPil
            )
            return opener(
                size={"longest_edge": _SIDE},
                max_image_size={"longest_edge": _SIDE},
                do_image_splitting=False,
            )
        case "internvl":
            return transformers.GotOcr2ImageProcessorPil(size=size, crop_to_patches=False)
        case "gemma3":
            return transformers.Gemma3ImageProcessorPil(size=size)
        case _:
            pixels = {"shortest_edge": 28 * 28, "longest_edge": 84 * 84}
            return transformers.Qwen2VLImageProcessorPil(size=pixels, patch_size=_PATCH)


def _write_template(place: str, family: str) -> str:
    text = (
        ""
        if family in ("llava", "idefics3", "smolvlm")
        else "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    )
    end = "" if family in ("llava", "idefics3", "smolvlm") else "{% endif %}"
    return (
        "{% for message in messages %}{{ '<' + message['role'] + '>' }}"
        + text
        + "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '"
        + place
        + "' }}"
        "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
        + end
        + "{% if message['role'] == 'assistant' %}{{ '</s>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
    )


def _describe(
    family: str, tokenizer: PreTrainedTokenizerBase, published: Published | None
) -> Mapping[str, Any]:
    """Return the settings of a config: two layers of width 32 for text and pictures."""
    ids = {key: tokenizer.convert_tokens_to_ids(name) for key, name in _TOKENS[family].items()}
    side, patch = (_SIDE, _PATCH) if published is None else (published.side, published.patch)
    tokens = 4 if published is None else next(iter(published.processor.values()), 0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    stop = tokenizer.eos_token_id
    text = {
        **sizes,
        "vocab_size": len(tokenizer),
        "num_key_value_heads": 2,
        "max_position_embeddings": 512 if published is None else 4096,
        "eos_token_id": stop,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    vision = {**sizes, "image_size": side, "patch_size": patch}
    match family:
        case "llava":
            return {
                "vision_config": {"model_type": "clip_vision_model", **vision},
                "text_config": {"model_type": "llama", **text},
                "image_token_index": ids["image_token"],
            }
        case "idefics3" | "smolvlm":
            return {
                "vision_config": vision,
                "text_config": {"model_type": "llama", **text},
                "image_token_id": ids["image_token"],
                "scale_factor": 4 if patch == 16 else 2,
                "pad_token_id": 0,
            }
        case "internvl":
            return {
                "vision_config": {
                    **vision,
                    "image_size": [side, side],
                    "patch_size": [patch, patch],
                },
                "text_config": {"model_type": "qwen2", **text},
                "image_token_id": ids["context_image_token"],
                "image_seq_length": tokens,
            }
        case "gemma3":
            return {
                "vision_config": {"model_type": "siglip_vision_model", **vision},
                "text_config": {
                    **text,
                    "head_dim": 16,
                    "sliding_window": 16,
                    "query_pre_attn_scalar": 16,
                },
                "image_token_index": ids["image_token"],
                "boi_token_index": ids["boi_token"],
                "eoi_token_index": ids["eoi_token"],
                "mm_tokens_per_image": tokens,
            }
        case _:
            rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
            vision = {
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_heads": 2,
                "out_hidden_size": 32,
                "patch_size": patch,
            }
            if family == "qwen2_vl":
                # The width of its tower has another name, and `hidden_size` is that of the text.
                vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2}
                vision |= {"mlp_ratio": 2, "patch_size": patch}
            elif family == "qwen2_5_vl":
                vision |= {
                    "window_size": 56 if published is None else 112,
                    "fullatt_block_indexes": [1],
                }
            else:
                vision |= {
                    "deepstack_visual_indexes": [0],
                    "num_position_embeddings": 16 if published is None else 2304,
                }
                text |= {"head_dim": 16}
                rope["mrope_interleaved"] = True
            return {
                "vision_config": vision,
                "text_config": {**text, "rope_parameters": rope},
                "image_token_id": ids["image_token"],
                "video_token_id": ids["video_token"],
                "vision_start_token_id": ids["vision_start"],
                "vision_end_token_id": ids["vision_end"],
            }
