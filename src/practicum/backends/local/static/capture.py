"""Turn a function without arguments into a function that replays its operations.

The function reads and writes tensors at fixed addresses, and never waits for a value from the
device.
"""

import threading
from collections.abc import Callable

import torch

Step = Callable[[], None]
Capture = Callable[[Step], Step]
"""A function that captures a step and returns its replay; it may run the step before that."""

_CAPTURING = threading.Lock()
"""Held during a capture: a process may only capture one graph at a time."""

WARM_UPS = 2
"""The number of runs before a capture: libraries initialize in the first runs."""


def run_eagerly(step: Step) -> Step:
    """Return the function itself, for devices that have no graphs."""
    return step


class CudaCapture:
    """Captures functions as CUDA graphs that share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # A capture and the runs before it need a separate stream.
        self._stream = torch.cuda.Stream()

    def __call__(self, step: Step) -> Step:
        """Warm the function up, capture it, and return a function that replays it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Another thread may train and allocate memory during the capture, which the capturing
        # thread must not do.
        with (
            _CAPTURING,
            torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"),
        ):
            step()
        return graph.replay


def choose_capture(device: torch.device) -> Capture:
    """Return the capture function for a device."""
    return CudaCapture() if device.type == "cuda" else run_eagerly
