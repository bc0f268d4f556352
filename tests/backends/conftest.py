"""Run the suites of trainer, sampler, scorer and self-teacher on every device and in both dtypes."""

import os
from collections.abc import Iterator

import pytest

from .places import CPU, ON_SECOND, PLACES, REPEATED, SECOND, Current, Place

if ON_SECOND in os.environ:
    import second_device  # registers the device, before anything computes

    assert SECOND.device == second_device.NAME

SUITES = ("test_trainer", "test_sampler", "test_self_teacher", "test_static")

TAKES_LONG = (
    "test_training_lowers_the_divergence",
    "test_frequencies_of_mixed_sequences_are_their_probabilities_by_enumeration",
)
"""Tests of thousands of operations, which are not repeated on this machine."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the tests of a suite every place; a test marked `float32` needs the rounding of float32."""
    if metafunc.module.__name__.rpartition(".")[2] not in SUITES:
        return
    exact = metafunc.definition.get_closest_marker("float32") is not None
    places = [place for place in PLACES if not exact or place.values[0].is_exact]  # type: ignore[union-attr]
    if metafunc.definition.get_closest_marker("cpu_only") is not None:
        places = [place for place in PLACES if place.values[0] is CPU]
    metafunc.parametrize("place", places, indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one case of each test at the places of this machine that only repeat the tests of the first."""
    seen: set[tuple[str, str]] = set()
    left_out: list[pytest.Item] = []
    for item in items:
        # Some items belong to a test without parameters.
        parameters = item.callspec.params if "callspec" in vars(item) else {}  # type: ignore[attr-defined]
        chosen = parameters.get("place")
        if chosen not in REPEATED:
            continue
        key = (item.nodeid.partition("[")[0], str(chosen))
        if key in seen or key[0].rpartition("::")[2] in TAKES_LONG:
            left_out.append(item)
        seen.add(key)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(map(id, left_out))
        items[:] = [item for item in items if id(item) not in gone]


@pytest.fixture(autouse=True)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Return the place at which `tiny` makes its models."""
    chosen: Place = getattr(request, "param", CPU)
    Current.place = chosen
    yield chosen
    Current.place = CPU
