"""Numbers about rollouts and answers, each with its source: what the doctor, the monitors and the report are made of."""

from practicum.statistics.answers import (
    agreement,
    calibration_error,
    distinct_ngrams,
    pass_at_k,
    similarity,
    unique_share,
)
from practicum.statistics.groups import group_pairs, mean_of
from practicum.statistics.intervals import (
    Interval,
    auroc,
    bootstrap,
    clustered,
    clustered_auroc,
    detectable,
    difference,
    overlaps_zero,
    ratio,
    rollouts_needed,
    wilson,
)
from practicum.statistics.repeats import holm, repeats_needed, sign_flips, t_interval, t_test
from practicum.statistics.repetition import is_degenerate, longest_run, repeated_share, repeated_tokens
from practicum.statistics.signal import (
    concentration,
    importance_health,
    participation,
    probability_error,
    quantiles,
    trapped,
)

__all__ = [
    "Interval",
    "agreement",
    "auroc",
    "bootstrap",
    "calibration_error",
    "clustered",
    "clustered_auroc",
    "concentration",
    "detectable",
    "difference",
    "distinct_ngrams",
    "group_pairs",
    "holm",
    "importance_health",
    "is_degenerate",
    "longest_run",
    "mean_of",
    "overlaps_zero",
    "participation",
    "pass_at_k",
    "probability_error",
    "quantiles",
    "ratio",
    "repeated_share",
    "repeated_tokens",
    "repeats_needed",
    "rollouts_needed",
    "sign_flips",
    "similarity",
    "t_interval",
    "t_test",
    "trapped",
    "unique_share",
    "wilson",
]
