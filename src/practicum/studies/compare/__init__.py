"""Compares methods fairly: the same task, prompts, seeds and budget for any set of recipes, and what may be said of them.

`compare` runs every arm with every seed and writes a table and a page; `arms` reads what is compared, `running` runs it,
`outcomes` says what came of it.
"""

from practicum.studies.compare.arms import Arm, Budget, Design, design
from practicum.studies.compare.comparing import Ran, Settings, compare, run_arms
from practicum.studies.compare.outcomes import Failure, Findings, Outcome, Point, findings, read_outcome
from practicum.studies.compare.page import mean_curve
from practicum.studies.compare.running import Job, run_all

__all__ = [
    "Arm",
    "Budget",
    "Design",
    "Failure",
    "Findings",
    "Job",
    "Outcome",
    "Point",
    "Ran",
    "Settings",
    "compare",
    "design",
    "findings",
    "mean_curve",
    "read_outcome",
    "run_all",
    "run_arms",
]
