"""Tiny targets with several layers, and their drafters."""

from dataclasses import replace
from typing import Any

import torch
from backends.tiny import hidden_signal, rollout
from transformers import AutoConfig, AutoModelForCausalLM

from practicum.backends.local.language_model import Decoding, LanguageModel
from practicum.backends.local.packing import enable_packing
from practicum.methods.eagle3 import eagle3
from practicum.models.config import DrafterConfig
from practicum.ports.drafters import DraftVocabulary
from practicum.types import Datum, Rollout

VOCABULARY = 64


def make_target(
    architecture: str = "llama",
    rows: int = VOCABULARY,
    seed: int = 0,
    decoding: Decoding = Decoding.NATIVE,
) -> LanguageModel:
    """Return a frozen target of five layers; its weights are large, so that predictions differ."""
    config = AutoConfig.for_model(
        architecture,
        vocab_size=rows,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=architecture == "llama",
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval()
    return enable_packing(LanguageModel(model.requires_grad_(False), rows, decoding=decoding))


def make_drafter(
    target: LanguageModel, vocabulary: int | None = 40, **settings: Any
) -> tuple[eagle3.Eagle3, DrafterConfig]:
    """Return a drafter with large weights over every second and a few further tokens."""
    rows = len(target.model.get_input_embeddings().weight)
    config = DrafterConfig(**{"layers": (1, 2, 4), "depth": 3, **settings})
    order = [*range(0, rows, 2), *range(1, rows, 2)]
    ids = torch.tensor(sorted(order[:vocabulary]))
    drafter = eagle3.build(target.model, config, DraftVocabulary(ids, rows), 0)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.mul_(6.0 if weight.ndim > 1 and weight is not drafter.lm_head.weight else 1.0)
    return drafter, config


def make_data(target: LanguageModel) -> list[Datum]:
    """Return texts of several lengths, one with a prompt shorter than the depth, and a mask with holes."""
    mask = [True, False, True, True, False, True, True]
    items: list[Rollout] = [rollout(1, 4, 1), rollout(6, 7, 2, mask=mask), rollout(3, 5, 3)]
    return [Datum(replace(item, rounds=()), hidden_signal(target, item)) for item in items]
