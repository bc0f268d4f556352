"""Trainer, sampler, scorer and self-teacher on a device that is not the CPU, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from toy import environment, forked

from .conftest import SUITES
from .places import ON_SECOND

HERE = Path(__file__).parent
THOUSANDS = (
    "test_rows_beyond_the_memory_wait",
    "test_what_is_drawn_after_a_stop_text_is_dropped",
    "test_a_mixed_request_gets_the_same_tokens_in_any_company",
    "test_a_completion_does_not_depend_on_its_company",
    "test_weights_that_replace_the_models_are_used",
)
"""Tests of thousands of operations, each of which other tests do there too: `make slow` alone does them."""


@pytest.mark.parametrize(
    "every", [pytest.param(8, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.slow)]
)
def test_the_suites_pass_on_a_second_device(every: int) -> None:
    """Of a test with many cases each eighth one, and by `make slow` all; shapes are checked where they are tested on a CPU."""
    files = [str(HERE / f"{name}.py") for name in SUITES]
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu", "--every", str(every)]
    if every > 1:
        options += ["-k", f"not ({' or '.join(THOUSANDS)})"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        env={**os.environ, ON_SECOND: "1", "JAXTYPING_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "passed" in done.stdout or "[100%]" in done.stdout


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_what_needs_one_is_skipped_and_says_why(tmp_path: Path) -> None:
    """Also tests whose fixtures make models there."""
    files = [str(HERE / name) for name in ("test_packing.py", "test_self_teacher.py")]
    options = ["-q", "-rs", "-n", "0", "-p", "no:cacheprovider", "-m", "gpu"]
    output = tmp_path / "output"
    status = forked(lambda: sys.exit(pytest.main([*options, *files])), output=output)
    printed = output.read_text(encoding="utf-8")
    assert status == 0, printed[-4000:]
    assert "no CUDA device is at hand: torch.cuda.is_available() is False" in printed


def test_what_ranks_gather_is_on_the_device_of_each(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "backends.ranks_on_second", str(tmp_path)],
        cwd=HERE.parent,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
