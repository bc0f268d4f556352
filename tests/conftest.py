"""Tests run on one thread and are the same every time."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from shapes import check_only_shapes

check_only_shapes()
# A write survives a process that is killed; only a machine without power loses one, and each wait for a disk takes 8 ms.
os.fsync = os.fstat
torch.set_num_threads(1)
settings.register_profile("practicum", derandomize=True, deadline=None, max_examples=25)
settings.load_profile("practicum")


FEW = 4
"""A test of so many cases runs all of them, whatever `--every` says."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a short run leave out most cases of tests that have many."""
    parser.addoption(
        "--every",
        type=int,
        default=1,
        help=f"of a test with more than {FEW} cases, run every so many",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take every so many cases of a test, beginning with its first."""
    every = config.getoption("every")
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
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = {item.nodeid for item in left_out}
        items[:] = [item for item in items if item.nodeid not in gone]


def pytest_collection_finish() -> None:
    """Let no collection of garbage walk through what was imported: torch and transformers alone are half a million objects."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none, before a fixture makes a tensor there."""
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("no CUDA device is at hand: torch.cuda.is_available() is False")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `student`, which knows nothing, and `teacher`, which has begun to learn to reverse strings."""
    from toy import make_model

    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "student", seed=1)
    make_model(folder / "teacher", seed=2, pretrain=60)
    return folder


@pytest.fixture
def notes() -> Iterator[list[str]]:
    """What the test's own context notes, as a console would show it."""
    from practicum.core.notes import show_notes

    texts: list[str] = []
    with show_notes(texts.append):
        yield texts


@pytest.fixture
def clean_tables() -> Iterator[None]:
    """Take out of the tables of entries what the test registers."""
    from practicum.functional.registry import TABLES

    tables = [table for _, table in TABLES.values()]
    before = [set(table) for table in tables]
    yield
    for table, names in zip(tables, before, strict=True):
        for name in set(table) - names:
            del table[name]


@pytest.fixture(scope="session")
def finished(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of four steps with evaluations; tests read it and leave it as it is."""
    from toy import toy_run

    return toy_run(models, tmp_path_factory.mktemp("runs"), {"evaluation.prompts": 8}).folder


@pytest.fixture(scope="session")
def rich(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with alarms and a doctor's word, and its page."""
    from report_pages import copied

    from practicum.report import write_report

    folder = copied(finished, tmp_path_factory.mktemp("rich") / "toy")
    write_report(folder)
    return folder


@pytest.fixture(scope="session")
def harmful(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which every text is hostile, and its page."""
    from report_pages import hostile

    from practicum.report import write_report

    folder = hostile(finished, tmp_path_factory.mktemp("harmful") / "toy")
    write_report(folder)
    return folder
