"""Statistics of rollouts and answers, each with its source, for doctor, monitors and report."""

from practicum.statistics.answer_sets import (
    calibration_error,
    distinct_ngrams,
    majority_agreement,
    pass_at_k,
    similarity,
    unique_share,
)
from practicum.statistics.groups import group_pairs, mean_of
from practicum.statistics.intervals import (
    Interval,
    auroc,
    bootstrap,
    cluster_bootstrap,
    clustered_auroc,
    contains_zero,
    minimum_detectable_difference,
    ratio,
    rollouts_needed,
    wilson,
)
from practicum.statistics.paired import FEWEST_PROMPTS, difference, mean_score, score_interval
from practicum.statistics.repeats import holm, repeats_needed, sign_flips, t_interval, t_test
from practicum.statistics.repetition import (
    is_degenerate,
    longest_run,
    repeated_share,
    repeated_tokens,
)
from practicum.statistics.signal import (
    concentration,
    has_low_divergence_run,
    importance_health,
    participation_ratio,
    probability_error,
    probability_errors,
    quantiles,
    window_means,
)
from practicum.statistics.turns import compare_turns, judge_turns

__all__ = [
    "FEWEST_PROMPTS",
    "Interval",
    "auroc",
    "bootstrap",
    "calibration_error",
    "cluster_bootstrap",
    "clustered_auroc",
    "compare_turns",
    "concentration",
    "contains_zero",
    "difference",
    "distinct_ngrams",
    "group_pairs",
    "has_low_divergence_run",
    "holm",
    "importance_health",
    "is_degenerate",
    "judge_turns",
    "longest_run",
    "majority_agreement",
    "mean_of",
    "mean_score",
    "minimum_detectable_difference",
    "participation_ratio",
    "pass_at_k",
    "probability_error",
    "probability_errors",
    "quantiles",
    "ratio",
    "repeated_share",
    "repeated_tokens",
    "repeats_needed",
    "rollouts_needed",
    "score_interval",
    "sign_flips",
    "similarity",
    "t_interval",
    "t_test",
    "unique_share",
    "wilson",
    "window_means",
]
