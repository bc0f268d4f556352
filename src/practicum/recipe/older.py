"""Recipes as earlier versions wrote them into run folders, brought up to the keys of today."""

from collections.abc import Mapping
from typing import Any

KNOBS = ("micro_batch_tokens", "graph_mib", "chunk_tokens", "sampling_batch")
MOVED = {f"train.{name}": f"backend.{name}" for name in KNOBS}
"""Keys of earlier recipes, and what they are called now."""


def bring_up(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved recipe under the keys of today; one that has them already stays as it is.

    Only a backend in this process ever had the keys that moved; for one at a service they said nothing.
    """
    train = data.get("train")
    if not isinstance(train, Mapping) or KNOBS[0] not in train:
        return dict(data)
    backend = data.get("backend") or {"type": "local", **{name: train[name] for name in KNOBS}}
    return {
        **data,
        "train": {key: value for key, value in train.items() if key not in KNOBS},
        "backend": backend,
    }
