"""Compares methods fairly: the same task, prompts, seeds and budget for any set of recipes, and what may be said of them.

`compare` runs every arm with every seed and writes a table and a page; `arms` reads what is compared, `running` runs it,
`outcomes` says what came of it.
"""

from practicum.studies.compare.arms import Arm, ComparisonBudget, Design, design
from practicum.studies.compare.comparing import FinishedRuns, Settings, compare, run_arms
from practicum.studies.compare.outcomes import (
    ComparisonResult,
    FailedRun,
    Outcome,
    Point,
    analyse_outcomes,
    read_outcome,
)
from practicum.studies.compare.page import mean_curve
from practicum.studies.compare.running import RunJob, run_all

__all__ = [
    "Arm",
    "ComparisonBudget",
    "ComparisonResult",
    "Design",
    "FailedRun",
    "FinishedRuns",
    "Outcome",
    "Point",
    "RunJob",
    "Settings",
    "analyse_outcomes",
    "compare",
    "design",
    "mean_curve",
    "read_outcome",
    "run_all",
    "run_arms",
]
