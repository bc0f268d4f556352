"""Seeds from names: each random stream belongs to (seed, step, prompt, sample), not to an order."""

import hashlib
import json
from collections.abc import Iterable


def seed_of(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on every part and on their order.

    Example: `seed_of(0, "rollout", step, prompt.id, sample)`.
    """
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def compute_seeds(names: Iterable[tuple[int | str, ...]]) -> list[int]:
    """Return the seed of each name, with one call of `seed_of` per name."""
    return [seed_of(*name) for name in names]
