"""Choose the folder of a run: a finished run keeps its own, and running again begins NAME-2."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from practicum.core.options import spell_options
from practicum.errors import PracticumError
from practicum.run_dir import RunDir, shorten_path

log = logging.getLogger(__name__)

LONGEST_NAME = 80
"""The most characters of a run's name."""


def choose_name(out: Path, name: str) -> str:
    """Return the name of a new run: NAME, or NAME-2, NAME-3, ... if the run NAME is finished."""
    run_dir = RunDir(out / name)
    if not (run_dir.summary_json.is_file() and run_dir.has_started()):
        return name
    names = (name[: LONGEST_NAME - len(f"-{number}")] + f"-{number}" for number in count(2))
    chosen = next(chosen for chosen in names if not RunDir(out / chosen).has_started())
    log.info(f"{shorten_path(run_dir.path)} holds a finished run, so the new run is {chosen}")
    return chosen


@contextmanager
def explain_name(name: str, chosen: str) -> Iterator[None]:
    """Log how to resume a run under another name than its recipe's, if an error ends it."""
    try:
        yield
    except PracticumError:
        if chosen != name:
            resume, rename = spell_options(resume=True), spell_options(overrides=[f"name={chosen}"])
            log.info(f"the run's name is {chosen}; to resume it, use {resume} and {rename}")
        raise
