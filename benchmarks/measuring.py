"""What all benchmarks share: medians, the machine, and one JSON line a result."""

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence

import torch
import transformers


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median with the least and the greatest."""
    return {
        "median": round(statistics.median(values), 4),
        "least": round(min(values), 4),
        "greatest": round(max(values), 4),
        "count": len(values),
    }


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "load": round(os.getloadavg()[0], 1),
    }


def report(name: str, **figures: object) -> None:
    """Print one result as one JSON line."""
    print(json.dumps({"benchmark": name, **figures, "machine": machine()}), flush=True)
    sys.stdout.flush()


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
