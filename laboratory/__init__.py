"""Reproductions: test the claims of papers by recipes, and compute verdicts from the runs.

`study` defines a reproduction and reads it from a file, `running` runs it, `results` holds the
measurements, `judging` computes the verdict on each claim, and `page` and `plot` show the results.
"""

from laboratory.page import render_evidence_page
from laboratory.results import Results, read_results
from laboratory.running import reproduce
from laboratory.study import load_reproduction, list_reproductions

__all__ = [
    "Results",
    "render_evidence_page",
    "load_reproduction",
    "read_results",
    "reproduce",
    "list_reproductions",
]
