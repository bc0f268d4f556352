"""Count the operations of a call, in place of timing it: bytecode steps of Python, and waits for numbers of a device."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

SOURCE = str(Path(__file__).parents[1] / "src" / "practicum")


def count_opcodes(call: Callable[[], object]) -> int:
    """Return the bytecode steps of the library in the call, including comprehensions."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


class _CountReads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def count_reads(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> int:
    """Return how often the call reads a number of a tensor or copies a tensor to the CPU.

    On a GPU the program waits at each of these until the device has done its work.
    """
    mode = _CountReads()
    with monkeypatch.context() as patch, mode:
        for name in ("tolist", "cpu", "numpy"):
            read = getattr(torch.Tensor, name)

            def counting(tensor: torch.Tensor, *words: Any, read: Any = read) -> Any:
                mode.count += 1
                return read(tensor, *words)

            patch.setattr(torch.Tensor, name, counting)
        call()
    return mode.count
