"""What a task may be built from."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TaskContext:
    """The run's seed, the folder that relative paths start from, and where rejected rows and remarks go."""

    seed: int
    base_dir: Path
    rejected_path: Path | None = None
    say: Callable[[str], None] = lambda text: None
