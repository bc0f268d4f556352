"""One Ray on this machine for all tests of a session, as small as possible."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Start Ray; runs join it and leave it running."""
    ray = pytest.importorskip("ray")
    from practicum.backends.ray.placement import connect

    # Each module that imports this fixture has a separate one.
    if ray.is_initialized():
        yield
        return
    connect(object_store_memory=200 * 2**20)
    yield
    ray.shutdown()
