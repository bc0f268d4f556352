"""Exit from a process in which something cannot be shut down.

A library that is stuck in its own shutdown would keep the process from ending, so the command line
leaves without waiting for it.
"""

import os
import sys
from collections.abc import Callable

LAST_ACTS: list[Callable[[], None]] = []
"""Functions that clean up after a stuck part of this process; empty if no part is stuck."""


def leave_if_stuck(code: int) -> None:
    """Exit immediately with an exit code if a part of the process cannot be shut down."""
    if LAST_ACTS:
        sys.stdout.flush()
        sys.stderr.flush()
        for act in LAST_ACTS:
            act()
        os._exit(code)
