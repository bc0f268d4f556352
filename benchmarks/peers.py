"""Run other libraries for comparison, each in a separate process and, where stated, in a separate environment."""

import argparse
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from benchmarks.measuring import ROOT, build_environment

PACKAGES = {"trl": ("trl", "trl>=1.16,<1.17"), "liger": ("liger_kernel", "liger-kernel>=0.8.5")}
"""Each peer's module, and what `pip install` needs to hear."""


def add_options(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """`--peer` and where it is installed."""
    parser.add_argument(
        "--peer", choices=names, nargs="+", default=[], help="compare with these too"
    )
    parser.add_argument(
        "--peer-python", default=sys.executable, help="a Python that has them (default: this one)"
    )


def find_installed(names: Sequence[str], python: str) -> list[str]:
    """Return the installed libraries, and print a line for each missing one."""
    present = [name for name in names if _read_version(name, python)]
    for name in names:
        if name not in present:
            print(describe_missing(name), flush=True)
    return present


def read_versions(names: Sequence[str], python: str) -> dict[str, str]:
    """The version of each peer."""
    return {name: _read_version(name, python) for name in names}


def describe_missing(name: str) -> str:
    """Return the line that tells how to install a missing peer."""
    return (
        f"{name} is not installed, so it is left out: pip install -e '.[peers]' (or '{PACKAGES[name][1]}'), or name "
        "another environment with --peer-python PATH"
    )


@functools.cache
def _read_version(name: str, python: str) -> str:
    code = (
        "import importlib.metadata as m, importlib.util as u; "
        f"print(m.version({PACKAGES[name][1].split('>')[0]!r}) if u.find_spec({PACKAGES[name][0]!r}) else '')"
    )
    try:
        ended = subprocess.run(
            [python, "-c", code],
            capture_output=True,
            text=True,
            check=False,
            env=build_environment(),
        )
    except OSError as error:
        raise SystemExit(f"--peer-python {python}: {error.strerror}") from error
    return ended.stdout.strip() if ended.returncode == 0 else ""


@dataclass(slots=True)
class Worker:
    """A process that answers each line of JSON with one; `python -m MODULE ARGUMENTS`."""

    module: str
    arguments: Sequence[object]
    python: str = sys.executable
    _process: "subprocess.Popen[str] | None" = None

    def __enter__(self) -> "Worker":
        command = [self.python, "-m", self.module, *map(str, self.arguments)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=build_environment(),
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def ask(self, **question: Any) -> Any:
        """The answer to one question."""
        self.send(**question)
        return self.receive()

    def send(self, **question: Any) -> None:
        """Put a question without waiting."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()

    def receive(self) -> Any:
        """Return the answer to the last question, and skip all other output of the process."""
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)["answer"]
        raise SystemExit(f"{self.module} ended before it answered; its last words are above")


def serve(answers: Callable[[dict[str, Any]], Any]) -> None:
    """Answer each line of the standard input until it ends."""
    for line in sys.stdin:
        print(json.dumps({"answer": answers(json.loads(line))}), flush=True)
