"""The end of a process in which something cannot be ended.

A library that is stuck in its own shutdown would keep the process from ending, so the command line
leaves without waiting for it.
"""

import os
import sys
from collections.abc import Callable

LAST_ACTS: list[Callable[[], None]] = []
"""Functions that end what a stuck part of this process would leave behind; empty if none is stuck."""


def leave_if_stuck(code: int) -> None:
    """End the process at once with an exit code if something in it cannot be ended."""
    if LAST_ACTS:
        sys.stdout.flush()
        sys.stderr.flush()
        for act in LAST_ACTS:
            act()
        os._exit(code)
