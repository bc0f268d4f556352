"""The devices and dtypes of test suites: a CPU, a device that is not the CPU, a CUDA device; float32 or bfloat16."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


@dataclass(frozen=True, slots=True)
class Place:
    """A device and the dtype of its products."""

    device: str = "cpu"
    dtype: str = "float32"

    @property
    def is_exact(self) -> bool:
        """True if two ways to compute the same value only differ by the rounding of float32."""
        return self.dtype == "float32"

    def __str__(self) -> str:
        return f"{self.device}-{self.dtype}"


CPU = Place()
SECOND = Place("second")
ON_SECOND = "PRACTICUM_SECOND_DEVICE"
"""The variable that makes a process of the tests compute only on the second device.

Torch registers a device before the first backward pass of a process or never, and then behaves differently in many
places. So `test_second_device.py` starts a process for it.
"""

PLACES = (
    pytest.param(CPU, id=str(CPU)),
    pytest.param(Place("cpu", "bfloat16"), id="cpu-bfloat16", marks=pytest.mark.long),
    pytest.param(Place("cuda"), id="cuda-float32", marks=pytest.mark.gpu),
    pytest.param(Place("cuda", "bfloat16"), id="cuda-bfloat16", marks=pytest.mark.gpu),
)

if ON_SECOND in os.environ:
    PLACES = (pytest.param(SECOND, id=str(SECOND)),)

REPEATED = (SECOND, Place("cpu", "bfloat16"))
"""The places where one case of each test is enough: they check tensor placement and rounding."""


class Current:
    """The place of the current test."""

    place = CPU


@contextmanager
def count_transfers() -> Iterator[Counter[str]]:
    """Count the block's transfers to and from the second device; none are counted at other places."""
    counts: Counter[str] = Counter()
    if Current.place is not SECOND:
        yield counts
        return
    from second_device import SecondTensor

    before = Counter(SecondTensor.counts)
    yield counts
    counts.update(SecondTensor.counts - before)
