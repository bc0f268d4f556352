"""Run tests on one thread, with the same result every time."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from shapes import check_only_shapes

check_only_shapes()
# A write survives a process that is killed; only a power failure loses one, and each wait for a disk takes 8 ms.
os.fsync = os.fstat
torch.set_num_threads(1)
settings.register_profile("practicum", derandomize=True, deadline=None, max_examples=25)
settings.load_profile("practicum")


FEW = 4
"""A test with at most this many cases runs all of them with any `--every`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a short run skip most cases of tests that have many, and a second run skip what the first has run."""
    parser.addoption(
        "--every",
        type=int,
        default=1,
        help=f"of a test with more than {FEW} cases, run every n-th case",
    )
    parser.addoption(
        "--long-only",
        default="",
        help="folders, with spaces between them, of which only the long tests are run",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run every n-th case of a test, beginning with its first, and of some folders only the long tests."""
    every = config.getoption("every")
    folders = [config.rootpath / name for name in config.getoption("long_only").split()]
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = [
        item
        for same in cases.values()
        if len(same) > FEW
        for place, item in enumerate(same)
        if place % every
    ]
    left_out += [
        item
        for item in items
        if not item.get_closest_marker("long")
        and any(item.path.is_relative_to(folder) for folder in folders)
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = {item.nodeid for item in left_out}
        items[:] = [item for item in items if item.nodeid not in gone]


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection: torch and transformers hold half a million objects."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need a GPU on machines without one, before a fixture creates a tensor on the GPU."""
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("no CUDA device is at hand: torch.cuda.is_available() is False")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `student`, which is untrained, and `teacher`, which has begun to learn to reverse strings."""
    from toy import make_model

    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "student", seed=1)
    make_model(folder / "teacher", seed=2, pretrain=60)
    return folder


@pytest.fixture
def notes() -> Iterator[list[str]]:
    """Collect the notes of the test's own context, as a console would show them."""
    from practicum.core.notes import show_notes

    texts: list[str] = []
    with show_notes(texts.append):
        yield texts


@pytest.fixture
def clean_tables() -> Iterator[None]:
    """Remove the entries that the test registers from the tables."""
    from practicum.functional.registry import TABLES

    tables = [table for _, table in TABLES.values()]
    before = [set(table) for table in tables]
    yield
    for table, names in zip(tables, before, strict=True):
        for name in set(table) - names:
            del table[name]


@pytest.fixture(scope="session")
def finished(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run of four steps with evaluations; tests only read it."""
    from toy import toy_run

    return toy_run(models, tmp_path_factory.mktemp("runs"), {"evaluation.prompts": 8}).folder


@pytest.fixture(scope="session")
def rich(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run with alarms and a doctor's verdict, and its page."""
    from report_pages import copied

    from practicum.report import write_report

    folder = copied(finished, tmp_path_factory.mktemp("rich") / "toy")
    write_report(folder)
    return folder


@pytest.fixture(scope="session")
def harmful(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run in which every text is hostile, and its page."""
    from report_pages import hostile

    from practicum.report import write_report

    folder = hostile(finished, tmp_path_factory.mktemp("harmful") / "toy")
    write_report(folder)
    return folder
