"""Trainer, sampler, scorer and self-teacher on a device that is not the CPU, in a separate process."""

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
SHORT = (
    "test_greedy_equals_generate",
    "test_a_request_gets_the_same_tokens_in_any_company",
    "test_the_step_is_adamw_on_the_clipped_gradient",
    "test_a_restored_trainer_goes_on_bit_for_bit",
    "test_local_and_remote_signals_with_different_numbers_of_candidates",
    "test_teachers_with_different_heads_in_one_batch",
    "test_states_that_wait_on_the_host_are_fetched_once_an_update",
    "test_a_restored_self_teacher_goes_on_bit_for_bit",
    "test_texts_of_ragged_lengths_are_those_of_the_modules",
    "test_a_window_is_one_transfer_there_and_one_back",
)
"""The tests of the suites that `make test` runs there; `make slow` runs all."""


@pytest.mark.parametrize(
    "is_whole",
    [pytest.param(False, marks=pytest.mark.long), pytest.param(True, marks=pytest.mark.slow)],
    ids=["short", "whole"],
)
def test_the_suites_pass_on_a_second_device(is_whole: bool) -> None:
    """The short form takes one case of some tests; shapes are checked by the tests on a CPU."""
    files = [str(next(HERE.rglob(f"{name}.py"))) for name in SUITES]
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
    options += [] if is_whole else ["--every", "24", "-k", " or ".join(SHORT)]
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
    """Also skip tests with fixtures that create models there."""
    files = [str(HERE / "local" / name) for name in ("test_packing.py", "test_self_teacher.py")]
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
