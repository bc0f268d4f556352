"""Numbers about rollouts and answers, each with its source: what the doctor, the monitors and the report are made of."""

from practicum.statistics.answers import (
    calibration_error,
    distinct_ngrams,
    majority_share,
    pass_at_k,
    similarity,
    unique_share,
)
from practicum.statistics.intervals import (
    Interval,
    auroc,
    bootstrap,
    clustered,
    clustered_auroc,
    difference,
    overlaps_zero,
    rollouts_needed,
    wilson,
)
from practicum.statistics.repetition import is_degenerate, longest_run, repeated_share, repeated_tokens
from practicum.statistics.signal import (
    ImportanceHealth,
    concentration,
    importance_health,
    participation,
    probability_error,
    quantiles,
    trapped,
)

__all__ = [
    "ImportanceHealth",
    "Interval",
    "auroc",
    "bootstrap",
    "calibration_error",
    "clustered",
    "clustered_auroc",
    "concentration",
    "difference",
    "distinct_ngrams",
    "importance_health",
    "is_degenerate",
    "longest_run",
    "majority_share",
    "overlaps_zero",
    "participation",
    "pass_at_k",
    "probability_error",
    "quantiles",
    "repeated_share",
    "repeated_tokens",
    "rollouts_needed",
    "similarity",
    "trapped",
    "unique_share",
    "wilson",
]
