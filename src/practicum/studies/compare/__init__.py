"""The fair comparison of methods: any recipes on the same task, prompts, seeds and budget.

`compare` runs every arm with every seed and writes a table and a page. `arms` reads the arms,
`running` runs them, `outcomes` tests the differences.
"""

from practicum.studies.compare.arms import ComparisonBudget, ComparisonSettings
from practicum.studies.compare.comparing import FinishedRuns, compare, run_arms, run_comparison
from practicum.studies.compare.comparison_page import build_mean_curve
from practicum.studies.compare.outcomes import FailedRun, Outcome, Point, read_outcome
from practicum.studies.compare.run_jobs import RunJob, open_starter, run_jobs

__all__ = [
    "ComparisonBudget",
    "ComparisonSettings",
    "FailedRun",
    "FinishedRuns",
    "Outcome",
    "Point",
    "RunJob",
    "build_mean_curve",
    "compare",
    "open_starter",
    "read_outcome",
    "run_arms",
    "run_comparison",
    "run_jobs",
]
