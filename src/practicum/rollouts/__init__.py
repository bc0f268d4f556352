"""From prompts to rollouts: sampled by the writer that the source names, decoded, and rewarded."""

from practicum.rollouts.batch import RolloutBatch, select_prompts
from practicum.rollouts.sources import (
    SOURCES,
    Cache,
    Prefix,
    Source,
    SourceChoice,
    StudentSource,
    needs_teacher_samples,
    list_conversation_problems,
    find_other_writer,
    needs_replay,
    list_source_problems,
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
    "needs_teacher_samples",
    "collect_rollouts",
    "list_conversation_problems",
    "load_recorded_rollouts",
    "find_other_writer",
    "needs_replay",
    "sample_rollouts",
    "sample_teacher_rollouts",
    "select_prompts",
    "list_source_problems",
    "to_exact_floats",
]
