"""A machine that is lost in the middle of a step ends the run in one line, or the run continues on the second machine."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from toy import environment, toy_run

from practicum.backends.ray import RAYS_PARAGRAPHS

from .ray_lost_machine import SIZES
from .test_ray import assert_close_runs

pytestmark = [pytest.mark.long, pytest.mark.slow]


def test_a_machine_that_is_lost_leaves_the_run_to_the_other(models: Path, tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "backends.ray_lost_machine", str(models), str(tmp_path)],
        cwd=Path(__file__).parents[1],
        # Ray reads this once, when it is imported, and a run imports it after setting it.
        env=environment({"RAY_DEDUP_LOGS_SKIP_REGEX": RAYS_PARAGRAPHS}),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    said = answer.stdout
    assert "(raylet)" not in said + answer.stderr, "Ray's own paragraphs"
    lost = (
        r"after step 2: trainer \d was lost in forward_backward; this step is discarded; resume "
        r"from .* \(newest checkpoint: of step 2\)"
    )
    assert re.search(rf"^exit 8: {lost}$", said, re.M)
    assert re.search(rf"^warning: {lost}; going on by itself, 1 of 1 times$", said, re.M)
    line = "the recipe asks for 4 GPUs and the cluster has 2; going on with backend.trainers=1"
    assert line in said
    assert len(re.findall("^killed [12] trainers", said, re.M)) == 2, said
    single = toy_run(models, tmp_path / "single", SIZES).folder
    for place in ("by itself", "resumed"):
        assert_close_runs(single, tmp_path / place / "toy")
