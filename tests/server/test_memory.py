"""The service's memory, except for models and answers, does not grow with the variety of requests."""

import ctypes
import os
import subprocess
import sys

import pytest
from toy import environment

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallinfo2"),
        reason="reads glibc's own count of bytes",
    ),
]

PROGRAM = """
import ctypes
import torch
from practicum.backends.local.prepared import prepack_head
from practicum.functional.head import Head
from practicum.server.serving import bound_memory

class Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks".split()]
    _fields_ += [("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t)]

library = ctypes.CDLL(None)
library.mallinfo2.restype = Counts

def multiply(first, last):
    for rows in range(first, last):
        head.logits(torch.ones(rows, 32))
    counts = library.mallinfo2()
    return counts.uordblks + counts.hblkhd

bound_memory()
with torch.no_grad():
    head = prepack_head(Head(torch.ones(64, 32), 64))
    before = multiply(1, 200)
    print(multiply(200, 400) - before)
"""
"""Runs batches of as many sizes as a service under load has; prints the growth of memory from 200 sizes to 400."""


def test_products_of_many_sizes_leave_nothing_behind() -> None:
    """Without the two bounds each size leaves some 280 KB of descriptions, up to 1,024 of them."""
    unset = {
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "",
        "LRU_CACHE_CAPACITY": "",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment(unset),
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 2**20
