"""The built package runs outside the repository, and each extra does its work in an environment that has it."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from email.message import Message
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from extras import ROOT, USES
from packaging.requirements import Requirement
from service import LEFT_OPEN, serving
from toy import forked

from benchmarks.demo import AS_MAKE_STARTS_IT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
OFFICIAL = ("torch>=2.6,<2.14",)
"""Installed before everything else, as in the Makefile."""


def list_packages(extra: str) -> set[str]:
    """Return the names of an extra's packages."""
    return {re.split(r"[\[<>=!~ ;]", requirement)[0] for requirement in EXTRAS[extra]}


def is_installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def clean_environment(folder: Path, **changes: str) -> dict[str, str]:
    """Return this process's environment without the paths of the repository, on one thread."""
    names = {"PYTHONPATH", "VIRTUAL_ENV", "PRACTICUM_CACHE"}
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return {**kept, "OMP_NUM_THREADS": "1", "PRACTICUM_CACHE": str(folder / "cache"), **changes}


def call(folder: Path, *words: object, **changes: str) -> str:
    """Return the output of a command in a folder outside the repository."""
    ended = subprocess.run(
        [*map(str, words)],
        cwd=folder,
        env=clean_environment(folder, **changes),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    return ended.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build the source distribution of the tree, and the wheel from it."""
    folder = tmp_path_factory.mktemp("built")
    call(folder, sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return {kind: next(folder.glob(f"*.{kind}")) for kind in ("whl", "tar.gz")}


@pytest.fixture(scope="module")
def metadata(built: dict[str, Path]) -> Message:
    with zipfile.ZipFile(built["whl"]) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
        return message_from_bytes(wheel.read(name))


def test_each_extra_has_a_use_that_takes_all_of_its_packages() -> None:
    assert {extra: set(use.packages) for extra, use in USES.items()} == {
        extra: list_packages(extra) for extra in EXTRAS
    }, "write the use of an extra, with its packages, into tests/extras.py"


def test_the_makefile_installs_the_torch_that_the_package_takes() -> None:
    (torch,) = [need for need in PROJECT["dependencies"] if need.startswith("torch")]
    assert f"TORCH := {torch}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert (torch,) == OFFICIAL


def test_the_demo_is_measured_as_make_starts_it() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert [f"{key}={value}" in makefile for key, value in AS_MAKE_STARTS_IT.items()] == [True] * 4


def test_the_versions_of_the_suite_are_those_that_the_package_takes() -> None:
    """Compare versions; `make versions` rewrites the file."""
    lines = (ROOT / "tests" / "versions.txt").read_text(encoding="utf-8").splitlines()
    written = {pin.name: pin.specifier for pin in map(Requirement, lines)}
    extras = [needs for extra in ("demo", "tasks", "datasets", "dev") for needs in EXTRAS[extra]]
    for need in map(Requirement, (*PROJECT["dependencies"], *extras)):
        if need.name != "torch":
            (pin,) = written[need.name]
            assert pin.operator == "==" and pin.version in need.specifier, need


@pytest.mark.long
def test_the_page_of_the_package_leads_nowhere_that_it_does_not_hold(metadata: Message) -> None:
    description = metadata.get_payload()
    assert isinstance(description, str) and "# practicum" in description
    targets = re.findall(r"\]\(([^)]*)\)", description)
    assert [target for target in targets if not target.startswith("https://")] == []
    assert "`docs/engines.md`" in description, "the path of a file is kept without its link"


@pytest.mark.long
def test_the_package_names_its_authors_its_words_and_the_pythons_that_ran(
    metadata: Message,
) -> None:
    assert metadata["Author"] == "The practicum authors"
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["License-File"] == "LICENSE"
    assert "on-policy distillation" in metadata["Keywords"]
    classifiers = "\n".join(metadata.get_all("Classifier", []))
    minors = [int(minor) for minor in re.findall(r"Python :: 3\.(\d+)$", classifiers, re.MULTILINE)]
    assert metadata["Requires-Python"] == f">=3.{min(minors)}"


@pytest.mark.long
def test_the_source_distribution_holds_what_the_repository_is_built_and_tested_with(
    built: dict[str, Path],
) -> None:
    with tarfile.open(built["tar.gz"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "Makefile",
        "LICENSE",
        "docs/index.md",
        "tests/conftest.py",
        "recipes/quickstart.yaml",
    } <= names
    assert not [name for name in names if name.startswith((".venv", "runs/", ".ci"))]


@pytest.mark.long
def test_the_installed_package_runs_outside_the_repository(
    built: dict[str, Path], tmp_path: Path
) -> None:
    check_package(install_with_these_dependencies(tmp_path, built["whl"]), tmp_path)


def install_with_these_dependencies(folder: Path, wheel: Path) -> Path:
    """Return the Python of a fresh environment with the package; everything else comes from this environment."""
    venv = folder / "venv"
    call(folder, sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin" / "python"
    (packages,) = venv.glob("lib/python*/site-packages")
    # The .pth files of that folder are not read, so this environment's own practicum is not there.
    (packages / "dependencies.pth").write_text(f"{distribution('torch').locate_file('')}\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    call(folder, *pip, "--no-deps", "--no-index", "--force-reinstall", wheel)
    return python


def check_package(python: Path, folder: Path) -> None:
    """Run the commands that need the files of the package: recipes, templates, plug-ins."""
    practicum = python.with_name("practicum")
    look = "import practicum as p; print(p.__version__, p.__file__)"
    version, place = call(folder, python, "-c", look).split()
    assert version == PROJECT["version"] and Path(place).is_relative_to(python.parents[1])
    assert "papers/gkd" in call(folder, practicum, "ls", "recipes")
    changes = ["train.steps=2", "student.model.pretrain.steps=2", "teacher.model.pretrain.steps=2"]
    call(folder, practicum, "run", "smoke/toy", *changes, "--out", "runs")
    assert (folder / "runs" / "toy" / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whl", "tar.gz"])
def test_the_package_runs_in_a_bare_environment(
    built: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    check_package(make_bare(tmp_path, str(built[kind])), tmp_path)


def make_bare(folder: Path, requirement: str) -> Path:
    """Return the Python of a fresh environment into which pip itself has installed a requirement."""
    call(folder, sys.executable, "-m", "venv", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    for wanted in (*OFFICIAL, requirement):
        call(folder, python, "-m", "pip", "install", "--quiet", wanted)
    call(folder, python, "-m", "pip", "check")
    return python


@pytest.fixture
def service(extra: str, models: Path, tmp_path: Path) -> Iterator[str]:
    """Return the address of a service, for the extra that uses one."""
    if extra != "tinker":
        yield ""
        return
    with serving(models, tmp_path / "served") as served:
        yield served.url


@pytest.mark.long
@LEFT_OPEN
@pytest.mark.parametrize(
    "extra",
    [
        # test_ray and test_tinker use both here; a use in a separate process takes as long as they do.
        pytest.param(extra, marks=() if USES[extra].can_fork else pytest.mark.slow)
        for extra in sorted(EXTRAS.keys() - {"dev"})  # these tests use dev
    ],
)
def test_an_extra_is_used_where_it_is_installed(extra: str, service: str, tmp_path: Path) -> None:
    missing = [package for package in sorted(USES[extra].packages) if not is_installed(package)]
    if missing:
        pytest.skip(f"not installed here: {', '.join(missing)}")
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT / "tests")))
    settings = {"SERVICE": service, "PYTHONPATH": paths}
    if not USES[extra].can_fork:
        call(tmp_path, sys.executable, ROOT / "tests" / "extras.py", extra, **settings)
        return

    def work() -> None:
        os.chdir(tmp_path)
        USES[extra].work()

    output = tmp_path / "output"
    status = forked(work, clean_environment(tmp_path, **settings), output)
    assert status == 0, output.read_text(encoding="utf-8")[-4000:]


@pytest.mark.slow
@LEFT_OPEN
@pytest.mark.parametrize(
    "extra",
    [pytest.param(extra, marks=pytest.mark.gpu if extra == "vllm" else ()) for extra in EXTRAS],
)
def test_an_extra_is_used_in_an_environment_of_its_own(
    extra: str, service: str, built: dict[str, Path], tmp_path: Path
) -> None:
    python = make_bare(tmp_path, f"practicum[{extra}] @ {built['whl'].as_uri()}")
    call(tmp_path, python, ROOT / "tests" / "extras.py", extra, SERVICE=service)
