"""The part of a from-scratch model that reads sounds: its config, its tokens, and its processor's files."""

import json
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    WhisperFeatureExtractor,
)

from practicum.models.config import ScratchConfig

TOKEN = "<sound>"

BANDS = 16
"""The bands of the spectrogram."""

SECONDS = 1
"""The longest sound."""


def describe_model(
    config: ScratchConfig, tokenizer: PreTrainedTokenizerBase, text: dict[str, Any]
) -> PretrainedConfig:
    """Return the config of a model of text and sounds with one layer for sounds, of the same width."""
    # The head has its own weights, and Qwen2 knows the width of a head by itself.
    text = {key: text[key] for key in text if key not in ("head_dim", "tie_word_embeddings")}
    token_id = tokenizer.convert_tokens_to_ids(TOKEN)
    return AutoConfig.for_model(
        config.architecture,
        text_config={"model_type": "qwen2", **text},
        audio_config={
            "model_type": f"{config.architecture}_encoder",
            "num_mel_bins": BANDS,
            "d_model": config.hidden_size,
            "encoder_layers": 1,
            "encoder_attention_heads": config.heads,
            "encoder_ffn_dim": 2 * config.hidden_size,
            # The spectrogram has 100 frames per second, and a convolution halves them.
            "max_source_positions": 50 * SECONDS,
            # The default scale hides a sound behind the positions.
            "initializer_range": 0.1,
        },
        **{
            "audio_token_index"
            if config.architecture == "qwen2_audio"
            else "audio_token_id": token_id
        },
    )


def write_processor(folder: Path) -> None:
    """Write the files of the processor of sounds into a model's folder."""
    WhisperFeatureExtractor(feature_size=BANDS, chunk_length=SECONDS).save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"audio_token": TOKEN}))
