"""A few seconds of the benchmark `soak`: clients, a trainer and a vandal together against a server in its own process."""

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

from benchmarks.soak import soak


@pytest.mark.long
def test_nothing_breaks_under_load():
    found = soak(seconds=4.0, clients=6)
    assert found["broken"] == 0, found["statuses"]
    assert found["waits"].keys() == {"sample", "score", "train step"}
    assert found["statuses"][400] > 0
