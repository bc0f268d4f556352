"""Compile the decode step for this processor on first use, and load it."""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from practicum.backends.local.processor import read_processor
from practicum.models.sources import locate_cache

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SOURCES, HEADER = (
    tuple(FOLDER / name for name in ("layer.c", "loss.c", "packed.c", "step.c")),
    FOLDER / "shared.h",
)
FLAGS = ("-O3", "-std=c11", "-fno-math-errno", "-ffp-contract=fast", "-fPIC", "-shared", "-pthread")
VECTORS = {
    "AVX512": ("-mavx512f", "-mfma", "-DLANES=16"),
    "AVX2": ("-mavx2", "-mfma", "-DLANES=8"),
}
"""The compiler flags of each vector width, by torch's name of the CPU capability."""

LANES = {"AVX512": 16, "AVX2": 8}
COMPILE_SECONDS = 120
"""The compiler's time limit, in seconds; after it, models decode through their modules."""


Argument = torch.Tensor | ctypes.Structure | float | None
"""An argument of a function of the program."""


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The compiled program and its vector width: `lanes` numbers of a panel's three vectors."""

    name: str
    lanes: int
    functions: ctypes.CDLL

    @property
    def panel(self) -> int:
        """The number of columns of a weight that are multiplied together."""
        return 3 * self.lanes

    def call(self, name: str, *arguments: Argument, threads: int | None = None) -> int:
        """Call a function with its arguments, followed by a number of threads (by default torch's).

        Integers are passed as `long`, floats as `float`, contiguous tensors and structs as
        addresses.
        """
        count = torch.get_num_threads() if threads is None else threads
        return self.functions[name](*map(_convert, arguments), ctypes.c_long(count))


def load_library() -> NativeLibrary | None:
    """Return the program for torch's vector width; None without a compiler or supported vectors."""
    return _load(torch.backends.cpu.get_cpu_capability())


def point_to(tensor: torch.Tensor) -> ctypes.c_void_p:
    """Return the address of a contiguous tensor's numbers; the caller keeps the tensor alive."""
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


def _convert(argument: Argument) -> Any:
    if isinstance(argument, torch.Tensor):
        return point_to(argument)
    if isinstance(argument, ctypes.Structure):
        return ctypes.byref(argument)
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    return argument if argument is None else ctypes.c_long(argument)


@cache
def _load(vectors: str) -> NativeLibrary | None:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if vectors not in VECTORS or platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    if compiler is None:
        log.info("no C compiler was found, so decoding goes through torch, which is slower")
        return None
    try:
        functions = ctypes.CDLL(str(_compile(compiler, vectors)))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning(
            f"the decode step could not be compiled with {compiler} ({type(error).__name__}), so "
            "decoding goes through torch, which is slower"
        )
        return None
    for function in (functions.measure_room, functions.measure_attention_room):
        function.restype = ctypes.c_long
    return NativeLibrary(f"native {vectors}", LANES[vectors], functions)


def _compile(compiler: str, vectors: str) -> Path:
    """Return the compiled file; raises OSError or SubprocessError if it cannot be made."""
    # A file is only used with the same processor, compiler, source and options.
    version = _run(compiler, "--version")
    texts = (path.read_text("utf-8") for path in (*SOURCES, HEADER))
    parts = (*texts, version, *FLAGS, *VECTORS[vectors], *read_processor())
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    path = locate_cache() / "native" / f"{name}.so"
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        _run(compiler, *FLAGS, *VECTORS[vectors], *map(str, SOURCES), "-o", str(made), "-lm")
        # Two processes may compile at the same time: each writes the same content.
        made.replace(path)
    return path


def _run(*command: str) -> str:
    result = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS
    )
    return result.stdout
