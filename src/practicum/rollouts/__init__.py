"""Turn prompts into rollouts: sample from the writers of a source, decode, and reward."""

from practicum.rollouts.annotating import NOTE_KINDS, add_notes, measure_notes
from practicum.rollouts.batch import RolloutBatch, select_prompts
from practicum.rollouts.drafts import is_replay, measure_drafts, score_drafts
from practicum.rollouts.segments import Segments
from practicum.rollouts.source import (
    SOURCES,
    HeldoutSearch,
    RolloutWriters,
    SourceChoice,
    SourceConfig,
    check_answers,
    list_task_problems,
    list_writer_problems,
)
from practicum.rollouts.tape import (
    RolloutArchive,
    RolloutRow,
    load_recorded_rollouts,
    to_exact_floats,
)
from practicum.rollouts.tool_use import as_environment, measure_conversations
from practicum.rollouts.traffic import Traffic, TrafficRow
from practicum.rollouts.writing import (
    add_rewards,
    collect_rollouts,
    sample_rollouts,
    sample_teacher_rollouts,
)

__all__ = [
    "NOTE_KINDS",
    "SOURCES",
    "HeldoutSearch",
    "RolloutArchive",
    "RolloutBatch",
    "RolloutRow",
    "RolloutWriters",
    "Segments",
    "SourceChoice",
    "SourceConfig",
    "Traffic",
    "TrafficRow",
    "add_notes",
    "add_rewards",
    "as_environment",
    "check_answers",
    "collect_rollouts",
    "is_replay",
    "list_task_problems",
    "list_writer_problems",
    "load_recorded_rollouts",
    "measure_conversations",
    "measure_drafts",
    "measure_notes",
    "sample_rollouts",
    "sample_teacher_rollouts",
    "score_drafts",
    "select_prompts",
    "to_exact_floats",
]
