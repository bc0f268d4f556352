"""A capture without a graph that checks a step against the limits of a CUDA graph, and replays it by calling it again.

Every operation of a run is recorded with the shapes of its results and the addresses of its outside tensors.
A replay must be the same, operation for operation: a graph would use the old shapes and addresses.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal")
"""Operations that wait for a number of the device, or have a shape that depends on such a number."""

MAKES = ("lift_fresh", "randn", "rand", "normal_", "uniform_", "exponential_", "multinomial")
"""Operations that bring numbers from the host, or from a generator that a graph would not advance."""

Line = tuple[str, tuple[Any, ...], tuple[int, ...]]


class NotStatic(AssertionError):
    """An operation that a graph could not replay."""


class Recorder(TorchDispatchMode):
    """Records the operations of one run of a step, and refuses operations that no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Line] = []
        self._inside: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in WAITS or name in MAKES:
            raise NotStatic(f"{name}: no graph can hold it")
        taken = [item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
        if name.startswith("index") and any(item.dtype == torch.bool for item in taken[1:]):
            raise NotStatic(f"{name} by a mask: its shape depends on numbers")
        result = func(*args, **kwargs)
        made = [item for item in tree_leaves(result) if isinstance(item, Tensor)]
        outside = tuple(
            item.data_ptr()
            for item in taken
            if item.untyped_storage().data_ptr() not in self._inside
        )
        known = {item.untyped_storage().data_ptr() for item in taken}
        for item in made:
            # A view of a tensor from outside is from outside. Holding new tensors keeps their addresses unique.
            storage = item.untyped_storage().data_ptr()
            if storage not in known:
                self._inside[storage] = item
        shapes = tuple((tuple(item.shape), item.dtype) for item in made)
        self.lines.append((str(func), shapes, outside))
        return result


class StrictCapture:
    """Captures steps as a graph would, and counts them and their replays."""

    def __init__(self) -> None:
        self.captured: list[list[Line]] = []
        self.replays = 0

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        """Run the step as a warm-up does, record one run, and return a replay that compares with it."""
        step()
        first = self._record(step)
        self.captured.append(first)

        def replay() -> None:
            self.replays += 1
            lines = self._record(step)
            assert len(lines) == len(first), "a replay has other operations"
            for number, (line, twin) in enumerate(zip(lines, first, strict=True)):
                if line != twin:
                    raise NotStatic(f"operation {number} is {line}, and was {twin}")

        return replay

    @staticmethod
    def _record(step: Callable[[], None]) -> list[Line]:
        with Recorder() as recorder:
            step()
        return recorder.lines
