"""Practicum works without its folder of methods: it finds methods by name and never imports them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import practicum
from practicum.core.plugins import METHODS, list_packaged, list_plugins
from practicum.objective import SIGNALS
from practicum.rollouts import SOURCES

SOURCE = Path(practicum.__file__).parent
RECIPES = SOURCE.parents[1] / "recipes"

PROGRAM = """
import importlib, pkgutil, sys
import pytest

import practicum
for module in pkgutil.walk_packages(practicum.__path__, "practicum."):
    if module.name.startswith("practicum.") and not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            # An extra that is not installed.
            assert error.name is not None and not error.name.startswith("practicum"), module.name
from practicum.core.plugins import list_plugins
assert "search" not in list_plugins("practicum.rollouts.sources")
from practicum.recipe import list_recipe_names
from practicum.runs.stages import load_pipeline_or_recipe
names = list_recipe_names()
assert "papers/gkd" in names and "papers/ovd" not in names
for name in names:
    load_pipeline_or_recipe(name)
from practicum.cli.app import app
app(["run", "smoke/toy", "train.steps=2", "--out", "run"])
"""


@pytest.mark.long
def test_every_core_module_is_imported_and_a_run_ends_without_them(tmp_path: Path) -> None:
    package = tmp_path / "site" / "practicum"
    ignored = shutil.ignore_patterns("methods", "__pycache__")
    shutil.copytree(SOURCE, package, ignore=ignored)
    shutil.copytree(RECIPES, package / "packaged_recipes", dirs_exist_ok=True)
    path = os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    assert list((tmp_path / "run").rglob("summary.json")), (
        process.stdout[-2000:] + process.stderr[-2000:]
    )


NAMING = Path(__file__).parent / "named_by_core.txt"
"""Tests of the core that use a part or a recipe of a method, count recipes or compare pages."""


@pytest.mark.slow
def test_the_suite_of_the_core_passes_without_them(tmp_path: Path) -> None:
    root = SOURCE.parents[1]
    ignored = shutil.ignore_patterns("methods", ".*", "__pycache__")
    shutil.copytree(root, tmp_path / "core", ignore=ignored)
    skipped = [f"--deselect={name}" for name in NAMING.read_text("utf-8").split()]
    kinds = "not slow and not gpu and not long"
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "auto",
            "-p",
            "no:cacheprovider",
            "-m",
            kinds,
            *skipped,
        ],
        cwd=tmp_path / "core",
        env={**os.environ, "PYTHONPATH": str(tmp_path / "core" / "src")},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout[-4000:]


def test_each_test_that_names_a_method_is_there() -> None:
    root = SOURCE.parents[1]
    for name in NAMING.read_text("utf-8").split():
        path, function = name.split("::")
        assert f"def {function}(" in (root / path).read_text("utf-8"), name


def test_the_parts_of_methods_are_listed_with_those_of_the_core() -> None:
    assert {"search", "student"} <= set(list_plugins(SOURCES)) & list_packaged(SOURCES)
    assert {"sorted", "full"} <= set(list_plugins(SIGNALS)) & list_packaged(SIGNALS)


def test_no_module_of_the_core_names_a_method() -> None:
    """Check that only one place finds them by name."""
    naming = [
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if "methods" not in path.relative_to(SOURCE).parts and METHODS in path.read_text("utf-8")
    ]
    assert naming == ["core/plugins.py"]
