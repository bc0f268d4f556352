"""Processes that torchrun started for one run: only one of them prints a shared message.

Before their first collective they share no state except the launcher's store.
"""

import hashlib
import os
from datetime import timedelta

SECONDS = 5.0
"""The timeout for the launcher's store, which is on this machine or on the first machine."""


def is_first_message(text: str) -> bool:
    """Return False if another process of the same launch has already printed this text."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    from torch.distributed.rendezvous import rendezvous

    key = f"practicum-said-{hashlib.sha256(text.encode()).hexdigest()}"
    try:
        # Processes that the launcher restarts get a store without the keys of the first start.
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=SECONDS)))
        return store.add(key, 1) == 1
    except (ValueError, RuntimeError):
        # A duplicate line is better than a missing one.
        return True
