"""From prompts to rollouts: sampled by the writer that the source names, decoded, and rewarded."""

from practicum.rollouts.annotating import NOTE_KINDS, add_notes, measure_notes
from practicum.rollouts.batch import RolloutBatch, select_prompts
from practicum.rollouts.correcting import measure_corrected
from practicum.rollouts.function_source import FunctionSource
from practicum.rollouts.replacing import measure_replaced
from practicum.rollouts.resampling import measure_resampled
from practicum.rollouts.responses import check_responses
from practicum.rollouts.restating import measure_restated
from practicum.rollouts.retrying import measure_retried
from practicum.rollouts.search import measure_search
from practicum.rollouts.segments import Segments
from practicum.rollouts.sources import (
    SOURCES,
    Cache,
    Correct,
    Prefix,
    Replace,
    Retry,
    Search,
    Served,
    Source,
    SourceChoice,
    StudentSource,
    TeacherSource,
    Traces,
    count_teacher_answers,
    list_answer_problems,
    list_conversation_problems,
    list_observation_problems,
    list_other_writers,
    list_source_problems,
    list_task_problems,
    name_guide,
    name_own_note,
    name_shown_note,
    needs_reference_samples,
    needs_replay,
    needs_teacher_samples,
)
from practicum.rollouts.tape import (
    RolloutArchive,
    RolloutRow,
    load_recorded_rollouts,
    to_exact_floats,
)
from practicum.rollouts.tool_use import as_environment, measure_conversations
from practicum.rollouts.traces import list_traced_rollouts, load_traced_rollouts
from practicum.rollouts.traffic import Traffic, TrafficRow
from practicum.rollouts.writing import (
    RolloutWriters,
    add_rewards,
    collect_rollouts,
    sample_rollouts,
    sample_teacher_rollouts,
)

__all__ = [
    "NOTE_KINDS",
    "SOURCES",
    "Cache",
    "Correct",
    "FunctionSource",
    "Prefix",
    "Replace",
    "Retry",
    "RolloutArchive",
    "RolloutBatch",
    "RolloutRow",
    "RolloutWriters",
    "Search",
    "Segments",
    "Served",
    "Source",
    "SourceChoice",
    "StudentSource",
    "TeacherSource",
    "Traces",
    "Traffic",
    "TrafficRow",
    "add_notes",
    "add_rewards",
    "as_environment",
    "check_responses",
    "collect_rollouts",
    "count_teacher_answers",
    "list_answer_problems",
    "list_conversation_problems",
    "list_observation_problems",
    "list_other_writers",
    "list_source_problems",
    "list_task_problems",
    "list_traced_rollouts",
    "load_recorded_rollouts",
    "load_traced_rollouts",
    "measure_conversations",
    "measure_corrected",
    "measure_notes",
    "measure_replaced",
    "measure_resampled",
    "measure_restated",
    "measure_retried",
    "measure_search",
    "name_guide",
    "name_own_note",
    "name_shown_note",
    "needs_reference_samples",
    "needs_replay",
    "needs_teacher_samples",
    "sample_rollouts",
    "sample_teacher_rollouts",
    "select_prompts",
    "to_exact_floats",
]
