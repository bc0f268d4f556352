"""`practicum compare`: several methods side by side."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from practicum.diagnosis.compare import Budget, Settings, compare
from practicum.errors import PracticumError
from practicum.tracking import open_console


def compare_arms(words: Sequence[str], settings: Settings, as_json: bool) -> None:
    """Run the comparison and show it; PracticumError, exit code 1, after the table where some runs failed."""
    with closing(open_console(as_json=as_json)) as console:
        found = compare(words, settings, console)
    if found.failures:
        total = len(found.failures) + len(found.outcomes)
        raise PracticumError(
            f"{len(found.failures)} of {total} runs failed, and the table stands without them; --resume tries them again"
        )


def settings_of(seeds: int, budget: str, at_once: int, out: Path, resume: bool, common: Sequence[str]) -> Settings:
    """The options of the command as settings; RecipeError where one cannot be right."""
    return Settings(seeds, Budget.parse(budget), at_once, out, resume, tuple(common))
