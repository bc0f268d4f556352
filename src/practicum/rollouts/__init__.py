"""From prompts to rollouts: sampled by the writer that the source names, decoded, and rewarded."""

from practicum.rollouts.batch import RolloutBatch, select_prompts
from practicum.rollouts.sources import (
    SOURCES,
    Cache,
    Prefix,
    Source,
    SourceChoice,
    StudentSource,
    asks_teacher,
    list_conversation_problems,
    other_writer,
    replays,
    source_problems,
)
from practicum.rollouts.tape import (
    RolloutArchive,
    RolloutRow,
    load_recorded_rollouts,
    to_exact_floats,
)
from practicum.rollouts.writing import (
    RolloutWriters,
    add_rewards,
    as_environment,
    collect_rollouts,
    sample_rollouts,
    sample_teacher_rollouts,
)

__all__ = [
    "SOURCES",
    "Cache",
    "Prefix",
    "RolloutArchive",
    "RolloutBatch",
    "RolloutRow",
    "RolloutWriters",
    "Source",
    "SourceChoice",
    "StudentSource",
    "add_rewards",
    "as_environment",
    "asks_teacher",
    "collect_rollouts",
    "list_conversation_problems",
    "load_recorded_rollouts",
    "other_writer",
    "replays",
    "sample_rollouts",
    "sample_teacher_rollouts",
    "select_prompts",
    "source_problems",
    "to_exact_floats",
]
