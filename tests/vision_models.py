"""Tiny vision-language models of each family, built from their configs with their own processors."""

import json
from collections.abc import Mapping
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
_PLACES = {
    "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "internvl": "<IMG_CONTEXT>",
    "gemma3": "<start_of_image>",
}
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 ?.,:=\n"


def build_vision_model(folder: Path, family: str, seed: int = 0) -> Path:
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
    config = AutoConfig.for_model(family, **_describe(family, tokenizer))
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        # The default scale leaves a tiny model's logits nearly flat, and Gemma begins with a map of zeros.
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.copy_(4 * weight if weight.any() else torch.randn_like(weight) / 10)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _open_image_processor(family).save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(_SETTINGS.get(family, {})))
    return folder


_SETTINGS: dict[str, dict[str, Any]] = {
    "llava": {
        "patch_size": _PATCH,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    },
    "idefics3": {"image_seq_len": 4},
    "internvl": {"image_seq_length": 4},
    "gemma3": {"image_seq_length": 4},
}


def _open_image_processor(family: str) -> Any:
    size = {"height": _SIDE, "width": _SIDE}
    match family:
        case "llava":
            return transformers.CLIPImageProcessorPil(size={"shortest_edge": _SIDE}, crop_size=size)
        case "idefics3":
            return transformers.Idefics3ImageProcessorPil(
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
        if family in ("llava", "idefics3")
        else "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    )
    end = "" if family in ("llava", "idefics3") else "{% endif %}"
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


def _describe(family: str, tokenizer: PreTrainedTokenizerBase) -> Mapping[str, Any]:
    """Return the settings of a config: two layers of width 32 for text and pictures."""
    ids = {key: tokenizer.convert_tokens_to_ids(name) for key, name in _TOKENS[family].items()}
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
        "max_position_embeddings": 512,
        "eos_token_id": stop,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    vision = {**sizes, "image_size": _SIDE, "patch_size": _PATCH}
    match family:
        case "llava":
            return {
                "vision_config": {"model_type": "clip_vision_model", **vision},
                "text_config": {"model_type": "llama", **text},
                "image_token_index": ids["image_token"],
            }
        case "idefics3":
            return {
                "vision_config": vision,
                "text_config": {"model_type": "llama", **text},
                "image_token_id": ids["image_token"],
                "scale_factor": 2,
                "pad_token_id": 0,
            }
        case "internvl":
            return {
                "vision_config": {
                    **vision,
                    "image_size": [_SIDE, _SIDE],
                    "patch_size": [_PATCH, _PATCH],
                },
                "text_config": {"model_type": "qwen2", **text},
                "image_token_id": ids["context_image_token"],
                "image_seq_length": 4,
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
                "mm_tokens_per_image": 4,
            }
        case _:
            rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
            vision = {
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_heads": 2,
                "out_hidden_size": 32,
                "patch_size": _PATCH,
            }
            if family == "qwen2_vl":
                # The width of its tower has another name, and `hidden_size` is that of the text.
                vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2}
                vision |= {"mlp_ratio": 2, "patch_size": _PATCH}
            elif family == "qwen2_5_vl":
                vision |= {"window_size": 56, "fullatt_block_indexes": [1]}
            else:
                vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
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
