"""The cost of a rounded teacher is read from the finished run."""

from pathlib import Path

import pytest
from toy import toy_run

from laboratory.measures.bits import read_rounding


@pytest.mark.long
@pytest.mark.parametrize("bits", ["nvfp4", None])
def test_a_rounded_teacher_has_its_price_and_one_with_all_bits_has_none(
    models: Path, tmp_path: Path, bits: str | None
):
    teacher = {"type": "model", "model": str(models / "teacher"), "quantization": bits}
    changes = {"teacher": teacher, "train": {"steps": 1}}
    readings = read_rounding(toy_run(models, tmp_path, changes).folder)
    assert bool(readings) == (bits is not None)
    assert all(0 < nats < 0.1 for nats in readings.values())
