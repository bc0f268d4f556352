"""The memory of this machine, or of the process's container if the container has less."""

from contextlib import suppress
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def read_total_memory() -> int:
    """Return the bytes of the machine, or the limit of the process's cgroup if less."""
    return min([psutil.virtual_memory().total, *_read_cgroup_limit()])


def read_free_memory() -> int:
    """Return the free bytes of the machine, or of the process's cgroup if it has less."""
    free = psutil.virtual_memory().available
    for limit in _read_cgroup_limit():
        free = min(free, limit - int((CGROUP / "memory.current").read_text()))
    return free


def _read_cgroup_limit() -> list[int]:
    """Return the limit of the cgroup in a list, which is empty without one."""
    with suppress(OSError, ValueError):  # no file outside of Linux, "max" without a limit
        return [int((CGROUP / "memory.max").read_text())]
    return []
