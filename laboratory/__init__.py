"""Reproductions: test the claims of papers by recipes, and compute verdicts from the runs.

`study` defines a reproduction and reads it from a file, `running` runs it, `results` holds the
measurements, `judging` computes the verdict on each claim, and `page` and `plot` show the results.
"""

from laboratory.page import name_page, render_claims, render_study
from laboratory.results import Results, read_results
from laboratory.runner import reproduce
from laboratory.study import list_reproductions, load_reproduction

__all__ = [
    "Results",
    "list_reproductions",
    "load_reproduction",
    "name_page",
    "read_results",
    "render_claims",
    "render_study",
    "reproduce",
]
