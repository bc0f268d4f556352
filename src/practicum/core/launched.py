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
    from torch.distributed import TCPStore

    # Processes that the launcher starts once more have the same store, and say it again.
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"practicum-said-{start}-{hashlib.sha256(text.encode()).hexdigest()}"
    try:
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=SECONDS),
            wait_for_workers=False,
        )
        return store.add(key, 1) == 1
    except (KeyError, ValueError, RuntimeError):
        # A line too many is better than none.
        return True
