"""Provide the shared parts of all benchmarks: rounds, medians, ratios, peak memory, the machine, a table and JSON lines of results.

Times are processor seconds of one thread, which other work on the machine hardly changes. Contenders alternate within a round, and
only ratios within one round are compared.
"""

import argparse
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks import goals

ROOT = Path(__file__).resolve().parents[1]
LINES = ROOT / "results" / "performance.jsonl"
WARM_UP, ROUNDS = 2, 5


@dataclass(frozen=True, slots=True)
class Session:
    """One run of a benchmark: how many rounds, and where its results go."""

    name: str
    quick: bool = False
    record: bool = False
    warm_up: int = WARM_UP
    rounds: int = ROUNDS
    command: str = ""
    load: float = field(default_factory=lambda: os.getloadavg()[0])
    ceilings: Mapping[str, float] = field(default_factory=dict)

    def report(
        self, readings: Mapping[str, Mapping[str, float]] | None = None, **figures: object
    ) -> dict[str, Any]:
        """Print how the goals stand and the JSON line; keep the line where it is wanted."""
        readings = {key: dict(reading) for key, reading in (readings or {}).items()}
        line = {
            "benchmark": self.name,
            "quick": self.quick,
            "command": self.command,
            **figures,
            "readings": readings,
            "ceilings": dict(self.ceilings),
            "machine": describe_machine(),
            "load": [round(self.load, 1), round(os.getloadavg()[0], 1)],
            "commit": describe_commit(),
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        stands = [
            goals.describe_standing(goals.BY_KEY[key].on(line), reading)
            for key, reading in readings.items()
            if key in goals.BY_KEY
        ]
        if stands and not self.quick:  # small sizes say nothing about the goals
            print(format_table(goals.HEAD, stands))
        print(json.dumps(line), flush=True)
        if self.record:
            with LINES.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        return line


def build_parser(about: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small sizes and few rounds: whether it works, not how fast",
    )
    parser.add_argument(
        "--record", action="store_true", help=f"append the results to {LINES.relative_to(ROOT)}"
    )
    parser.add_argument(
        "--rounds", type=int, help=f"rounds that are kept (default {ROUNDS}, with --quick 2)"
    )
    return parser


def open_session(
    name: str, options: argparse.Namespace, ceilings: Mapping[str, float] | None = None
) -> Session:
    """Open the session of a command, with one thread; warm-up rounds precede the recorded rounds."""
    torch.set_num_threads(1)
    rounds = options.rounds or (2 if options.quick else ROUNDS)
    command = f"python -m benchmarks {name} {shlex.join(strip_local_options(sys.argv[1:]))}".strip()
    warm_up = 1 if options.quick else WARM_UP
    return Session(
        name, options.quick, options.record, warm_up, rounds, command, ceilings=ceilings or {}
    )


def strip_local_options(arguments: Sequence[str]) -> list[str]:
    """The arguments that anyone would repeat: without `--record` and without where this machine keeps its peers."""
    repeated = []
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "--peer-python":
            next(remaining, None)
        elif argument != "--record" and not argument.startswith("--peer-python="):
            repeated.append(argument)
    return repeated


def interleave(
    contenders: Mapping[str, Callable[[], float]], rounds: int, warm_up: int
) -> dict[str, list[float]]:
    """Return the results of each contender in the rounds after the warm-up; every other round goes through them backwards."""
    results: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(warm_up + rounds):
        order = list(contenders) if number % 2 == 0 else list(contenders)[::-1]
        for name in order:
            value = contenders[name]()
            if number >= warm_up:
                results[name].append(value)
    return results


def build_timer(work: Callable[[], object]) -> Callable[[], float]:
    """The work as something that returns the processor seconds it took."""

    def run_timed() -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    return run_timed


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, minimum and maximum, and the range as a share of the median."""
    middle = statistics.median(values)
    return {
        "median": round_digits(middle),
        "least": round_digits(min(values)),
        "greatest": round_digits(max(values)),
        "spread": round_digits((max(values) - min(values)) / abs(middle)) if middle else 0.0,
        "count": len(values),
    }


def compute_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, float]:
    """The ratios of each round: their median, least and greatest."""
    return spread([above / below for above, below in zip(numerators, denominators, strict=True)])


def build_reading(value: float) -> dict[str, float]:
    """A reading that was taken once."""
    return spread([value])


def scale_reading(reading: Mapping[str, float], factor: float) -> dict[str, float]:
    """The reading in another unit."""
    sized = {key: round_digits(reading[key] * factor) for key in ("median", "least", "greatest")}
    return {**reading, **sized}


def fit_exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The slope of a straight line through the logarithms: 1 where the value grows in proportion to the size."""
    xs, ys = [math.log(size) for size in sizes], [math.log(value) for value in values]
    return statistics.linear_regression(xs, ys).slope


def round_digits(value: float, digits: int = 5) -> float:
    """Round to this number of significant digits."""
    return float(f"{value:.{digits}g}")


def format_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned columns for a terminal."""
    cells = [list(map(str, head)), *([_format_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _format_cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def clear_peak() -> None:
    """Reset the peak of this process's memory to its current use (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def read_memory(what: str = "VmHWM") -> float:
    """This process's memory in MiB (Linux): `VmHWM` its peak, `VmRSS` what it holds now."""
    status = Path("/proc/self/status").read_text()
    return (
        next(int(line.split()[1]) for line in status.splitlines() if line.startswith(what)) / 1024
    )


def run_in_process(module: str, *arguments: object, python: str = sys.executable) -> Any:
    """Return the last line that another process prints, read as JSON."""
    command = [python, "-m", module, *map(str, arguments)]
    ended = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=build_environment(), check=False
    )
    if ended.returncode:
        raise SystemExit(
            f"{shlex.join(command[1:])}: exit {ended.returncode}: {ended.stderr.strip()[-800:]}"
        )
    return json.loads(ended.stdout.strip().splitlines()[-1])


def build_environment() -> dict[str, str]:
    """Return the environment of a child process: one thread, and no downloads from a hub."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def describe_machine() -> dict[str, object]:
    """Describe the machine and the versions that the figures were measured on."""
    return {
        "processor": _read_processor(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _read_version("transformers"),
        "practicum": _read_version("practicum"),
        "load": round(os.getloadavg()[0], 1),
    }


def describe_commit() -> str:
    """The commit that was measured, with a plus where files differ from it."""
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=True,
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "src"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}+" if changed else head


def _read_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def _read_processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(
                line.partition(":")[2].strip() for line in file if line.startswith("model name")
            )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
