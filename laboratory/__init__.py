"""Reproductions: what papers claim, put to the test by recipes, a table and a plot, with the verdict computed from the runs.

`study` says what a reproduction is and reads one from its file; `running` runs it by `practicum compare`; `results` holds
what was measured; `judging` says whether each claim holds; `page` and `plot` show it.
"""

from laboratory.judging import Judgement, judge_claim
from laboratory.page import evidence_page
from laboratory.results import Results, read_results
from laboratory.running import reproduce
from laboratory.study import Reproduction, load_reproduction, reproduction_names

__all__ = [
    "Judgement",
    "Reproduction",
    "Results",
    "evidence_page",
    "judge_claim",
    "load_reproduction",
    "read_results",
    "reproduce",
    "reproduction_names",
]
