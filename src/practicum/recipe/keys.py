"""Find the key of a recipe that a word means, such as `train.steps` for `steps`."""

import difflib

from practicum.recipe.sections import (
    EvaluationConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainConfig,
)

OTHER_NAMES = {
    "lr": "optimizer.learning_rate",
    "batch_size": "train.prompts_per_step",
    "max_steps": "train.steps",
    "num_generations": "rollout.n",
    "student_model": "student.model",
    "teacher_model": "teacher.model",
    "tracking": "tracking",
}
"""The words of other programs, and a section that is one word."""


def find_key(word: str) -> str | None:
    """Return the dotted key that a word without its section names, or None if it is not a key."""
    sections = {
        "train": TrainConfig,
        "optimizer": OptimizerConfig,
        "rollout": RolloutConfig,
        "evaluation": EvaluationConfig,
    }
    # The first section keeps a name that several have.
    keys = dict(OTHER_NAMES)
    for section, model in sections.items():
        for name in model.model_fields:
            keys.setdefault(name, f"{section}.{name}")
    name = word.replace("-", "_")
    if "." in name and name in keys.values():
        return name
    matches = difflib.get_close_matches(name, keys, n=1, cutoff=0.85)
    return keys[matches[0]] if matches else None
