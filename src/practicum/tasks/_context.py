"""What a task may be built from."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TaskContext:
    """The run's seed, the folder that relative paths start from, and where rejected rows are written."""

    seed: int
    base_dir: Path
    rejected_path: Path | None = None
