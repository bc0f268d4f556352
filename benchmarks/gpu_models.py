"""Write a model folder of the shape of a Qwen3 with random weights, which `practicum run` reads.

    python -m benchmarks gpu_models 0.6B FOLDER

The GPU benchmarks create the same models in memory.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.models import build_tokenizer
from practicum.backends.local.adapters import add_adapters
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.packing import enable_packing
from practicum.models.config import Lora

LONGEST = 1 << 17
"""The positions of every shape: 64k tokens must fit."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen3: width, layers, query heads, key-value heads, their width, feed-forward width, tied embeddings."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    feed_forward: int
    tied: bool
    vocabulary: int = 151936

    @property
    def body(self) -> int:
        """Parameters of the layers' linear maps."""
        attention = 2 * self.width * self.head_width * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.width * self.feed_forward)

    @property
    def head(self) -> int:
        """Parameters of the head."""
        return self.vocabulary * self.width

    def count_kv_bytes(self, tokens: int) -> int:
        """Return the bytes of keys and values of these tokens, at 2 bytes per number."""
        return 4 * tokens * self.layers * self.kv_heads * self.head_width


SHAPES = {
    "0.6B": Shape(1024, 28, 16, 8, 128, 3072, True),
    "1.7B": Shape(2048, 28, 16, 8, 128, 6144, True),
    "4B": Shape(2560, 36, 32, 8, 128, 9728, True),
    "8B": Shape(4096, 36, 32, 8, 128, 12288, False),
    "tiny": Shape(64, 2, 4, 2, 16, 128, True, 512),
    "tiny-teacher": Shape(96, 2, 4, 2, 16, 192, False, 512),
}


def build_config(shape: Shape) -> Qwen3Config:
    """Return transformers' settings of a shape."""
    settings: dict[str, Any] = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.feed_forward,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "max_position_embeddings": LONGEST,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": None,
        "eos_token_id": 1,
        # The embedding of a padding token is zero, and a text that begins with one overflows the
        # gradient of 28 norms.
        "pad_token_id": None,
    }
    return Qwen3Config(**settings)


def build_model(
    name: str, device: str, *, learns: bool = False, lora: bool = False
) -> LanguageModel:
    """Return a model that multiplies in bfloat16 and keeps trained weights in float32, as in a run."""
    full = learns and not lora
    dtype = torch.float32 if full else torch.bfloat16
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(build_config(SHAPES[name]), dtype=dtype).eval()
    model.requires_grad_(full)
    if learns and lora:
        add_adapters(model, Lora(rank=16), 0, list(range(SHAPES[name].layers)))
        for weight in model.parameters():
            if weight.requires_grad:
                weight.data = weight.data.float()
    return enable_packing(LanguageModel(model, SHAPES[name].vocabulary, autocast=True), LONGEST)


def write_folder(shape: str, folder: Path, *, learns: bool = False) -> None:
    """Write a model and a tokenizer with a word per token; a model that learns has weights in float32."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    build_model(shape, device, learns=learns).model.save_pretrained(folder)
    build_tokenizer(SHAPES[shape].vocabulary).save_pretrained(folder)


def main() -> None:
    """Write the folder that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    write_folder(options.shape, options.folder)


if __name__ == "__main__":
    main()
