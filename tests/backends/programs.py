"""The compiled program for one vector width."""

import pytest
import torch

from practicum.backends.local.native import library
from practicum.backends.local.native.library import NativeLibrary


def open_program(vectors: str) -> NativeLibrary:
    """Return the program; skip the test where this machine cannot build or run it."""
    if vectors == "AVX512" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("this processor has no AVX-512")
    made = library._load(vectors)
    if made is None:
        pytest.skip("no C compiler")
    return made
