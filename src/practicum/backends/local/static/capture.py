"""Turn a function of no arguments into one that replays its operations.

The function reads and writes tensors that stay where they are, and waits for no number.
"""

import threading
from collections.abc import Callable

import torch

Step = Callable[[], None]
Capture = Callable[[Step], Step]
"""Return a function that does what the captured one does; the captured one may run before that."""

_CAPTURING = threading.Lock()
"""Held during a capture: a process may capture one graph at a time."""

WARM_UPS = 2
"""The runs before a capture: libraries set themselves up in the first ones."""


def run_eagerly(step: Step) -> Step:
    """Return the function itself, for devices that have no graphs."""
    return step


class CudaCapture:
    """Captures functions as CUDA graphs that share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # A capture needs a stream of its own, and so do the runs before it.
        self._stream = torch.cuda.Stream()

    def __call__(self, step: Step) -> Step:
        """Warm the function up, capture it, and return what replays it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Another thread may train meanwhile and take memory, which a graph forbids its own thread.
        with (
            _CAPTURING,
            torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"),
        ):
            step()
        return graph.replay


def choose_capture(device: torch.device) -> Capture:
    """Return how steps are captured on a device."""
    return CudaCapture() if device.type == "cuda" else run_eagerly
