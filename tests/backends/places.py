"""Where the tests of a suite compute: on a CPU, on a device that is not the CPU, on a CUDA device; in float32 or bfloat16."""

from dataclasses import dataclass

import pytest


@dataclass(frozen=True, slots=True)
class Place:
    """A device and the dtype of products there."""

    device: str = "cpu"
    dtype: str = "float32"

    @property
    def is_exact(self) -> bool:
        """True if two ways to compute the same thing differ by the rounding of float32 alone."""
        return self.dtype == "float32"

    def __str__(self) -> str:
        return f"{self.device}-{self.dtype}"


CPU = Place()
PLACES = (
    pytest.param(CPU, id=str(CPU)),
    pytest.param(Place("second"), id="second-float32", marks=pytest.mark.long),
    pytest.param(Place("cpu", "bfloat16"), id="cpu-bfloat16", marks=pytest.mark.long),
    pytest.param(Place("cuda"), id="cuda-float32", marks=pytest.mark.gpu),
    pytest.param(Place("cuda", "bfloat16"), id="cuda-bfloat16", marks=pytest.mark.gpu),
)

REPEATED = (Place("second"), Place("cpu", "bfloat16"))
"""The places where one case of each test is enough: they show where a tensor is and what is rounded."""


class Current:
    """The place of the test that runs now."""

    place = CPU
