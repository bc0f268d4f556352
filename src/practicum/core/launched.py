"""Processes that torchrun started for one run: what all of them find out, one of them says.

Until they have met they know nothing of each other, but the launcher keeps a store for all.
"""

import hashlib
import os
from datetime import timedelta

SECONDS = 5.0
"""The time in which the launcher's store answers; it is on this machine or on the first one."""


def is_first_to_say(text: str) -> bool:
    """Return False if another process of the same launch says the same text."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    from torch.distributed.rendezvous import rendezvous

    key = f"practicum-said-{hashlib.sha256(text.encode()).hexdigest()}"
    try:
        # Processes that the launcher starts once more find a store without the keys of the first.
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=SECONDS)))
        return store.add(key, 1) == 1
    except (ValueError, RuntimeError):
        # A line too many is better than none.
        return True
