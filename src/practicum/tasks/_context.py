"""The context that a task is built in."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TaskContext:
    """The run's seed, the folder that relative paths start from, and the file of rejected rows.

    A task adds to `packages` the packages whose version decides its prompts and rewards.
    """

    seed: int
    base_dir: Path
    rejected_path: Path | None = None
    packages: list[str] = field(default_factory=list)
