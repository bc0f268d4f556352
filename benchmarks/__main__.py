"""Measure one thing by its name.

Example: `python -m benchmarks rollout --quick` (seconds, wide bounds), `python -m benchmarks rollout --record` (minutes, kept).
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
    "step",
    "cache",
    "precision",
    "sizes",
    "teachers",
    "scaling",
    "startup",
    "journey",
    "house",
    "digests",
    "endurance",
    "report",
    "demo",
    "residency",
    "monitors",
    "alarms",
    "failures",
    "broken",
    "broken_server",
    "remote",
    "asynchronous",
    "service",
    "soak",
    "papers",
    "plan",
    "gpu",
    "page",
)
SEVERAL_THREADS = ("demo", "broken", "broken_server", "papers", "gpu", "page")
"""Those that do not compare processor times, or set the threads of their processes themselves."""


def main() -> None:
    """Hand the arguments after the name to that benchmark."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(listing())
        return
    name, *rest = arguments
    if name not in NAMES or not _file(name).is_file():
        sys.exit(f"no benchmark is named {name!r}; there are {', '.join(present())}")
    if name not in SEVERAL_THREADS:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.argv = [f"python -m benchmarks {name}", *rest]
    importlib.import_module(f"benchmarks.{name}").main()


def listing() -> str:
    """What there is, a line each."""
    width = max(map(len, NAMES))
    lines = [f"  {name:<{width}}  {about(name)}" for name in present()]
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


def present() -> list[str]:
    """The names whose module is there."""
    return [name for name in NAMES if _file(name).is_file()]


def about(name: str) -> str:
    """The first line of a benchmark's docstring, read without importing it."""
    return (ast.get_docstring(ast.parse(_file(name).read_text(encoding="utf-8"))) or "").partition(
        "\n"
    )[0]


def _file(name: str) -> Path:
    return Path(__file__).parent / f"{name}.py"


if __name__ == "__main__":
    main()
