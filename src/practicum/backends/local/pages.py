"""Return the memory of unused weights to the operating system.

A model's file is memory-mapped, so its weights take memory after they are first read. Once their
products use copies in oneDNN's layout, the plain weights are no longer needed. The system reads
them from the file again if they are needed later.
"""

import ctypes
import mmap
import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

from torch import Tensor

PAGE_OUT = 21
"""`MADV_PAGEOUT` of Linux 5.4 and later; the system keeps pages that it cannot read again."""


def page_out(weights: Iterable[Tensor]) -> None:
    """Let the system reclaim the pages of these weights, and disable read-ahead for them."""
    if not sys.platform.startswith("linux"):
        return
    for weight in weights:
        start = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = weight.data_ptr() + weight.nbytes - start
        if weight.device.type == "cpu" and length > 0:
            # A kernel that does not support an advice refuses it; the weights then stay in memory.
            for advice in (mmap.MADV_RANDOM, PAGE_OUT):
                _load_libc().madvise(start, length, advice)


@cache
def _load_libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc
