"""Recipes of earlier versions in run folders, translated to today's keys."""

from collections.abc import Mapping
from typing import Any

KNOBS = ("micro_batch_tokens", "graph_mib", "chunk_tokens", "sampling_batch")
MOVED = {f"train.{name}": f"backend.{name}" for name in KNOBS}
"""Today's keys by the keys of earlier recipes."""


def bring_up(recipe_data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved recipe with today's keys; a recipe that has them stays as it is."""
    train = recipe_data.get("train")
    if not isinstance(train, Mapping) or KNOBS[0] not in train:
        return dict(recipe_data)
    # Only the local backend used the keys that moved: at a service they had no effect.
    backend = recipe_data.get("backend")
    backend = backend or {"type": "local", **{name: train[name] for name in KNOBS}}
    return {
        **recipe_data,
        "train": {key: value for key, value in train.items() if key not in KNOBS},
        "backend": backend,
    }
