"""A paper's recipe at the size of a toy."""

import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toy import make_model

SMALL = {
    "train.steps": 24,
    "train.prompts_per_step": 3,
    "train.checkpoint_every": None,
    "train.threads": 1,
    "evaluation.prompts": 0,
    "student.lora": None,
    "student.trainable_layers": None,
}

LENGTHS = {"rollout.n": 3, "rollout.max_new_tokens": 6}
"""For recipes without them."""

PRETRAINING = 120
"""The steps of models from scratch."""

REAL = {"papers/gates": 3, "papers/kepo": 3, "papers/srpo": 3}
"""The steps of recipes that keep their models when their parts are examined: they need right answers or notes."""

SPECIAL = {
    "papers/caopd": {"rollout.max_new_tokens": 24},
    "papers/gad": {"train.steps": 60},
    "papers/llm4teach": {"rollout.max_new_tokens": 60},
    "papers/crisp": {"train.steps": 52},
    "papers/distillm": {"train.steps": 48, "evaluation.prompts": 2, "evaluation.every": 1},
}
"""Additional needs of a recipe: a confidence in letters, more turns of a game, a held-out metric, more steps."""


def make_two_models(folder: Path) -> tuple[Path, Path]:
    """Write two models with enough characters for every recipe's prompts."""
    first, second = (
        make_model(folder / f"model-{seed}", alphabet=string.printable, seed=seed)
        for seed in (1, 2)
    )
    return first, second


def shrink(
    name: str,
    recipe_data: Mapping[str, Any],
    models: tuple[Path, Path] | None,
    steps: int | None = None,
) -> dict[str, Any]:
    """Return a recipe with a few small steps and no monitors.

    Models from scratch are hardly trained. `models` take the place of other models: one of the
    student, one of all others; without them, models stay. Lengths in the recipe stay.
    """
    small = dict(recipe_data)
    if models is not None:
        small = {key: _replace_models(key, section, models) for key, section in small.items()}
    needs = SPECIAL.get(name, {}) | ({} if steps is None else {"train.steps": steps})
    for key, value in {**LENGTHS, **SMALL, **needs}.items():
        section, field = key.split(".")
        if key in needs or key in SMALL or field not in small.get(section, {}):
            small[section] = {**small.get(section, {}), field: value}
    return {**small, "monitors": "off", "name": "small"}


def _replace_models(section: str, data: Any, models: tuple[Path, Path]) -> Any:
    if isinstance(data, list):
        return [_replace_models(section, entry, models) for entry in data]
    if not isinstance(data, Mapping):
        return data
    replaced = {key: _replace_models(section, entry, models) for key, entry in data.items()}
    if isinstance(data.get("model"), Mapping):
        replaced["model"] = {**data["model"], "pretrain": {"steps": PRETRAINING}}
    elif "model" in data:
        replaced["model"] = str(models[section != "student"])
    return replaced
