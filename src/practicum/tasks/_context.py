"""What a task may be built from."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TaskContext:
    """The run's seed, the folder that relative paths start from, and where rejected rows go.

    A task adds to `packages` those whose version decides what its prompts and rewards are.
    """

    seed: int
    base_dir: Path
    rejected_path: Path | None = None
    packages: list[str] = field(default_factory=list)
