"""Crash injection at named points, so that tests can check the state after a crash at that point.

`PRACTICUM_FAULT=save.before_rename:2,update:5` kills the process with SIGKILL the second time it is
about to rename a checkpoint, or the fifth time it reaches an update, whichever comes first. Without
the variable a point costs one lookup in the environment. Points: `rollout`, `score`, `update`,
`save.after_tensors`, `save.before_rename`, `save.after_rename`, `scores.before_rename`,
`stage.done`, `stage.exported`, `compare.run_ended`.
"""

import os
import signal
from collections import Counter

VARIABLE = "PRACTICUM_FAULT"
_reached: Counter[tuple[str, str]] = Counter()


def inject_fault(point: str) -> None:
    """Kill this process if `PRACTICUM_FAULT` names this point and the current count of passes."""
    setting = os.environ.get(VARIABLE)
    if not setting:
        return
    # Counts belong to one value of the variable: a test that changes it starts again at 1.
    _reached[setting, point] += 1
    if (point, _reached[setting, point]) in [_parse(entry) for entry in setting.split(",")]:
        os.kill(os.getpid(), signal.SIGKILL)


def _parse(entry: str) -> tuple[str, int]:
    """Parse `"update:5"` into `("update", 5)`."""
    point, _, count = entry.strip().partition(":")
    if not point or not count.isdecimal() or int(count) < 1:
        raise ValueError(
            f"{VARIABLE} has {entry!r}, which names no moment; write POINT:N, for example update:5"
        )
    return point, int(count)
