"""From prompts to rollouts: written by whoever the source names, read back as text, and rewarded."""

from practicum.rollouts.batch import Batch, prompts_of_step
from practicum.rollouts.sources import (
    SOURCES,
    Cache,
    Prefix,
    Source,
    SourceChoice,
    StudentSource,
    replays,
    source_problems,
)
from practicum.rollouts.tape import Archive, TapeRow, digits, read_tape
from practicum.rollouts.writing import Authors, rewarded, sample_rollouts, write_rollouts

__all__ = [
    "SOURCES",
    "Archive",
    "Authors",
    "Batch",
    "Cache",
    "Prefix",
    "Source",
    "SourceChoice",
    "StudentSource",
    "TapeRow",
    "digits",
    "prompts_of_step",
    "read_tape",
    "replays",
    "rewarded",
    "sample_rollouts",
    "source_problems",
    "write_rollouts",
]
