"""Give pages of memory back to the system that hold weights nobody reads any more.

A model's file is mapped, so its weights take memory from when they are first read. Once their products go through copies in
oneDNN's layout, the plain weights are only in the way. The system reads them again from the file if they are needed after all.
"""

import ctypes
import mmap
import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

from torch import Tensor

PAGE_OUT = 21
"""`MADV_PAGEOUT` of Linux 5.4 and later: the system keeps what it cannot read again."""


def page_out(weights: Iterable[Tensor]) -> None:
    """Let the system take the pages of these weights, and read a looked-up row back without its neighbours."""
    if not sys.platform.startswith("linux"):
        return
    for weight in weights:
        start = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = weight.data_ptr() + weight.nbytes - start
        if weight.device.type == "cpu" and length > 0:
            # A kernel that knows neither advice refuses it; the weights then stay where they are.
            for advice in (mmap.MADV_RANDOM, PAGE_OUT):
                _load_libc().madvise(start, length, advice)


@cache
def _load_libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc
