"""Write folders of a tiny Qwen2 and a tiny Qwen3: one byte-level BPE, four more tokens in the second, other padding."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

MORE = ("<tool_response>", "</tool_response>", "<think>", "</think>")
"""The tokens that Qwen3 has and Qwen2.5 lacks."""

ROWS = {"student": 384, "teacher": 448}
"""The rows of the embeddings, padding included."""

_TURNS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
)
TEMPLATES = {
    "student": _TURNS + "{% endif %}",
    "teacher": _TURNS
    + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
}

QUESTIONS = [f"{a} plus {b}" for a in range(1, 6) for b in range(1, 4)]


def build_tokenizer(role: str) -> PreTrainedTokenizerFast:
    """Build a byte-level BPE with the control tokens of ChatML, plus the tokens of `MORE` for the teacher."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*QUESTIONS, "user assistant system"] * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=TEMPLATES[role],
        clean_up_tokenization_spaces=False,
    )
    fast.add_special_tokens(
        {
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "additional_special_tokens": ["<|im_start|>"],
        }
    )
    if role == "teacher":
        fast.add_tokens(list(MORE))
    return fast


def write_pair(folder: Path) -> Path:
    """Write `student` (Qwen2), `teacher` (Qwen3) and `data.jsonl` into the folder."""
    kinds: dict[str, type[PretrainedConfig]] = {"student": Qwen2Config, "teacher": Qwen3Config}
    for seed, (role, kind) in enumerate(kinds.items()):
        tokenizer = build_tokenizer(role)
        size: dict[str, Any] = {"head_dim": 8} if role == "teacher" else {}
        config = kind(
            vocab_size=ROWS[role],
            hidden_size=32 if role == "teacher" else 16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            initializer_range=0.3,
            max_position_embeddings=256,
            tie_word_embeddings=role == "student",
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            pad_token_id=tokenizer.pad_token_id,
            **size,
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder / role)
        tokenizer.save_pretrained(folder / role)
    rows = [
        {"id": str(number), "prompt": question, "answer": "4"}
        for number, question in enumerate(QUESTIONS)
    ]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder


def pair_recipe(folder: Path, **sections: Any) -> dict[str, Any]:
    """Return a recipe of three steps for the pair; `sections` replace sections of the recipe."""
    return {
        "name": "pair",
        "student": {"model": str(folder / "student")},
        "teacher": {"type": "model", "model": str(folder / "teacher"), "thinking": False},
        "task": {"type": "jsonl", "path": str(folder / "data.jsonl"), "verifier": "number"},
        "rollout": {"n": 1, "max_new_tokens": 6},
        "objective": {"signal": "full", "divergence": "reverse_kl"},
        "optimizer": {"learning_rate": 0.01},
        "train": {"steps": 3, "prompts_per_step": 4, "threads": 1},
        "evaluation": {"prompts": 0},
        **sections,
    }
