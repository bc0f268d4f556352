"""The protocol of settings that name files of the user."""

from pathlib import Path
from typing import Protocol, runtime_checkable


@runtime_checkable
class ReadsFiles(Protocol):
    """The settings of a part that reads files of the user."""

    def find_problems(self, base_dir: Path) -> list[str]:
        """Return what is wrong with the files, one line each; relative paths start at `base_dir`."""
        ...
