"""Measurements with another package, written with the date and the versions if a folder is named."""

import json
import os
import platform
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


def record(
    package: str, version: str, results: Mapping[str, Any], command: str = "make peers"
) -> Iterator[None]:
    """Let the tests of a module run, and write their results to the folder that `PRACTICUM_RECORD` names."""
    yield
    if (folder := os.environ.get("PRACTICUM_RECORD")) and results:
        about = {
            "date": datetime.now(UTC).date().isoformat(),
            "command": command,
            package: version,
            "torch": torch.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, no GPU",
        }
        text = json.dumps({**about, "results": results}, indent=2)
        (Path(folder) / f"{package}.json").write_text(text + "\n", encoding="utf-8")
