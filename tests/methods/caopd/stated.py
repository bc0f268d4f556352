"""A run in which every answer states the confidence that the student may have."""

from typing import Any

STATED: dict[str, Any] = {
    "student.model": {"hidden_size": 16, "layers": 1, "heads": 2, "tokenizer": "bytes"},
    "teacher": {
        "type": "privileged",
        "teacher": {"type": "self", "weights": "ema"},
        "question": "{question} Sure: {sure}",
    },
    "notes": {"sure": {"type": "rate"}},
    "rollout": {"n": 2, "max_new_tokens": 20, "source": "restate(sure)"},
    "train.prompts_per_step": 3,
    "train.checkpoint_every": 1,
    "train.steps": 3,
}
"""Changes of the toy recipe: every answer states the confidence that the student may have."""
