"""Crash injection at named points, so that tests can ask what survives a crash exactly there.

`PRACTICUM_FAULT=save.before_rename:2,update:5` kills the process with SIGKILL the second time it is about to rename a
checkpoint, or the fifth time it reaches an update, whichever comes first. Without the variable a point costs one
look-up in the environment. Points: `rollout`, `score`, `update`, `save.after_tensors`, `save.before_rename`,
`save.after_rename`, `scores.before_rename`, `stage.done`, `stage.exported`, `compare.run_ended`.
"""

import os
import signal
from collections import Counter

VARIABLE = "PRACTICUM_FAULT"
_reached: Counter[tuple[str, str]] = Counter()


def fault(point: str) -> None:
    """Kill this process here if `PRACTICUM_FAULT` says so."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    _reached[wanted, point] += 1  # another value of the variable counts anew
    if (point, _reached[wanted, point]) in [_parse(item) for item in wanted.split(",")]:
        os.kill(os.getpid(), signal.SIGKILL)


def _parse(item: str) -> tuple[str, int]:
    """`"update:5"` to `("update", 5)`."""
    point, _, count = item.strip().partition(":")
    if not point or not count.isdecimal() or int(count) < 1:
        raise ValueError(
            f"{VARIABLE} has {item!r}, which names no moment; write POINT:N, for example update:5"
        )
    return point, int(count)
