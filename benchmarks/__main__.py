"""Run one benchmark by its name.

Example: `python -m benchmarks rollout --quick` (seconds, wide bounds), `python -m benchmarks rollout --record` (minutes, stored).
"""

import ast
import importlib
import os
import sys
from pathlib import Path

NAMES = (
    "ceilings",
    "loss",
    "rollout",
    "flips",
    "turns",
    "drafts",
    "packing",
    "step",
    "cache",
    "layout",
    "precision",
    "sizes",
    "teachers",
    "scaling",
    "processes",
    "weighted",
    "startup",
    "sweep",
    "journey",
    "golds",
    "settings",
    "end_to_end",
    "house",
    "structure",
    "keys",
    "digests",
    "endurance",
    "report",
    "demo",
    "residency",
    "monitors",
    "alarms",
    "failures",
    "broken",
    "verdicts",
    "broken_server",
    "remote",
    "asynchronous",
    "service",
    "fairness",
    "soak",
    "workers",
    "papers",
    "credit",
    "plan",
    "hub",
    "gpu",
    "gpu_models",
    "gpu_profile",
    "wheels",
    "page",
    "prose",
)
SEVERAL_THREADS = (
    "demo",
    "broken",
    "broken_server",
    "papers",
    "gpu",
    "gpu_models",
    "gpu_profile",
    "wheels",
    "page",
)
"""Benchmarks that do not compare processor times, or that set the threads of their processes themselves."""


def main() -> None:
    """Pass the arguments after the name to that benchmark."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(describe_benchmarks())
        return
    name, *options = arguments
    if name not in NAMES or not _locate(name).is_file():
        sys.exit(f"no benchmark is named {name!r}; there are {', '.join(list_benchmarks())}")
    if name not in SEVERAL_THREADS:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.argv = [f"python -m benchmarks {name}", *options]
    importlib.import_module(f"benchmarks.{name}").main()


def describe_benchmarks() -> str:
    """Return the help: a line for each benchmark, and an example."""
    width = max(map(len, NAMES))
    lines = [f"  {name:<{width}}  {read_headline(name)}" for name in list_benchmarks()]
    example = (__doc__ or "").strip().rpartition("\n")[2]
    return "\n".join(
        [
            "usage: python -m benchmarks NAME [--help] [--quick] [--record] ...",
            "",
            *lines,
            "",
            example,
        ]
    )


def list_benchmarks() -> list[str]:
    """Return the names of the benchmarks that have a module."""
    return [name for name in NAMES if _locate(name).is_file()]


def read_headline(name: str) -> str:
    """Return the first line of a benchmark's docstring, read without importing it."""
    return (
        ast.get_docstring(ast.parse(_locate(name).read_text(encoding="utf-8"))) or ""
    ).partition("\n")[0]


def _locate(name: str) -> Path:
    return Path(__file__).parent / f"{name}.py"


if __name__ == "__main__":
    main()
