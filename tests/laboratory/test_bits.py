"""What the rounding of a run's teacher costs is read from the finished run."""

from pathlib import Path

import pytest

from laboratory.measures.bits import read_rounding
from practicum.recipe import load_recipe
from practicum.runs import run

pytestmark = pytest.mark.long


def test_a_rounded_teacher_has_its_price_and_one_with_all_bits_has_none(tmp_path: Path) -> None:
    for bits in ("nvfp4", "null"):
        overrides = [
            f"name=bits-{bits}",
            f"teacher.quantization={bits}",
            "train.steps=1",
            "train.prompts_per_step=2",
            "evaluation.prompts=0",
        ]
        readings = read_rounding(run(load_recipe("smoke/toy", overrides), out=tmp_path).folder)
        assert bool(readings) == (bits == "nvfp4")
        assert all(0 < nats < 0.1 for nats in readings.values())
