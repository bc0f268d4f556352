"""Download the wheels that a GPU machine without a network is missing, to copy them with the source tree.

    python -m pip list --format json >there.json      # on the GPU machine
    python -m benchmarks wheels --installed there.json --python 3.12 --folder .whl
    python -m pip install --no-index --no-deps --target .site .whl/*.whl      # on the GPU machine

Versions are taken from this environment. torch, triton and the CUDA packages are never downloaded: they come with the machine.
Without `--installed`, every other package that practicum and its GPU tests import is downloaded.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

WANTED = ("practicum", "beartype", "hypothesis", "pytest")
"""The packages that the GPU tests and benchmarks import directly."""
PROVIDED = ("torch", "triton", "nvidia", "cuda")
"""The first words of packages that belong to the GPU machine."""
PLATFORMS = tuple(
    f"manylinux{version}_x86_64"
    for version in ("_2_28", "_2_27", "_2_24", "_2_17", "2014", "2010", "1")
)


def main() -> None:
    """Download the missing wheels and list them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--installed", type=Path, help="the machine's `pip list --format json`")
    parser.add_argument("--python", default="3.12", help="the machine's Python (default 3.12)")
    parser.add_argument("--folder", type=Path, default=Path(".whl"), help="where the wheels go")
    options = parser.parse_args()
    installed = {} if options.installed is None else read_installed(options.installed)
    missing = list(find_missing(installed, options.python))
    print(f"missing there: {', '.join(missing) or 'nothing'}")
    if missing:
        command = build_command(missing, options.python, options.folder)
        if subprocess.run(command, check=False).returncode:
            raise SystemExit("pip could not download the wheels; its own lines above say why")


def read_installed(path: Path) -> dict[str, str]:
    """Return name and version of each package in the output of `pip list --format json`."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return {canonicalize_name(row["name"]): row["version"] for row in rows}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SystemExit(f"{path} is not the output of pip list --format json: {error}") from None


def find_missing(installed: Mapping[str, str], python: str) -> Iterator[str]:
    """Yield `name==version` of each package that the machine lacks, or has in a version that does not fit."""
    environment = {**default_environment(), "python_version": python, "extra": ""}
    waiting, visited = [Requirement(name) for name in WANTED], set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in visited or name.split("-")[0] in PROVIDED:
            continue
        visited.add(name)
        if name != "practicum":
            if name in installed and installed[name] in requirement.specifier:
                continue
            yield f"{name}=={metadata.version(name)}"
        for line in metadata.requires(name) or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate(environment):
                waiting.append(needed)


def build_command(missing: list[str], python: str, folder: Path) -> list[str]:
    """Return pip's command for wheels of another Python, without the packages that they need."""
    target = ["--python-version", python, "--implementation", "cp"]
    platforms = [part for platform in PLATFORMS for part in ("--platform", platform)]
    return [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
        *("--only-binary=:all:", "--dest", str(folder), *target, *platforms, *missing),
    ]


if __name__ == "__main__":
    main()
