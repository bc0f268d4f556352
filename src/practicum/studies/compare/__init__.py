"""The fair comparison of methods: any recipes on the same task, prompts, seeds and budget.

`compare` runs every arm with every seed and writes a table and a page. `arms` reads the arms,
`running` runs them, `outcomes` tests the differences.
"""

from practicum.studies.compare.arms import ComparisonBudget, ComparisonSettings
from practicum.studies.compare.comparing import FinishedRuns, compare, run_arms
from practicum.studies.compare.outcomes import FailedRun, Outcome, Point, read_outcome
from practicum.studies.compare.page import build_mean_curve
from practicum.studies.compare.running import RunJob, run_jobs

__all__ = [
    "ComparisonBudget",
    "FailedRun",
    "FinishedRuns",
    "Outcome",
    "Point",
    "RunJob",
    "ComparisonSettings",
    "compare",
    "build_mean_curve",
    "read_outcome",
    "run_jobs",
    "run_arms",
]
