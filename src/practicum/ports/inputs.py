"""The protocols of settings that say what else a part needs: files of the user, tools."""

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

from practicum.types import Prompt


@runtime_checkable
class ReadsFiles(Protocol):
    """The settings of a part that reads files of the user."""

    def find_problems(self, base_dir: Path) -> list[str]:
        """Return what is wrong with the files, one line each; relative paths start at `base_dir`."""
        ...


@runtime_checkable
class ChecksPrompts(Protocol):
    """The settings of a teacher that cannot score every prompt."""

    def check_prompts(self, prompts: Iterable[Prompt]) -> None:
        """Raise DataError at the first prompt that the teacher cannot score."""
        ...


@runtime_checkable
class OffersTools(Protocol):
    """The settings of a task whose answers may call tools; only then is it built for a chat."""

    offers_tools: ClassVar[bool]
