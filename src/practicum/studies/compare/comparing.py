"""A comparison from its words to its page."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from practicum.core.stopping import catch_stop_signals
from practicum.errors import PracticumError
from practicum.recipe.methods import describe_method
from practicum.run_dir import RunDir, near, write_json
from practicum.runs.console import Console, SilentConsole
from practicum.studies.compare.arms import ComparisonBudget, Design, design
from practicum.studies.compare.outcomes import (
    ComparisonResult,
    FailedRun,
    Outcome,
    analyse_outcomes,
    read_outcome,
)
from practicum.studies.compare.page import write_page
from practicum.studies.compare.running import plan_jobs, run_all
from practicum.studies.compare.tables import arm_table, pair_table


@dataclass(frozen=True, slots=True)
class Settings:
    """How to compare: seeds, budget, runs at once, where, and what every arm's recipe is changed by.

    `first` is the first seed, `may_differ` what arms need not share.
    """

    seeds: int = 3
    budget: ComparisonBudget = field(default_factory=ComparisonBudget)
    at_once: int = 2
    out: Path = Path("runs/compare")
    resume: bool = False
    common: tuple[str, ...] = ()
    first: int = 0
    may_differ: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class FinishedRuns:
    """The runs of a comparison: those that finished, and those that failed."""

    design: Design
    home: Path
    outcomes: list[Outcome]
    failures: list[FailedRun]


def compare(
    words: Sequence[str], settings: Settings, console: Console | None = None
) -> ComparisonResult:
    """Run every arm with every seed and write `compare.json` and `compare.html`; what they came to.

    Raises RecipeError where the arms cannot be compared, Interrupted after a signal, and PracticumError where no run
    finished. Runs that failed are in the findings.
    """
    console = console or SilentConsole()
    ran = run_arms(words, settings, console)
    recipes, first = ran.design.recipes, ran.design.seeds[0]
    methods = {arm.name: describe_method(recipes[arm.name][first]) for arm in ran.design.arms}
    budget = ran.design.budget
    limits = {} if budget.amount is None else {budget.unit: budget.amount}
    came_to = analyse_outcomes(methods, ran.outcomes, ran.failures, limits)
    described = {
        "arms": [asdict(arm) for arm in ran.design.arms],
        "seeds": list(ran.design.seeds),
        "budget": str(budget),
    }
    content = json.loads(json.dumps({"design": described, **asdict(came_to)}))
    write_json(ran.home / "compare.json", content)
    write_page(ran.home / "compare.html", content)
    _show(content, ran.home, console)
    return came_to


def run_arms(words: Sequence[str], settings: Settings, console: Console) -> FinishedRuns:
    """Run every arm with every seed, and read what the runs left; raises what `compare` raises."""
    found = design(
        words, settings.seeds, settings.budget, settings.common, settings.first, settings.may_differ
    )
    home = settings.out.absolute()
    jobs = plan_jobs(found, home, settings.resume)
    home.mkdir(parents=True, exist_ok=True)
    with RunDir(home).lock(), catch_stop_signals() as stop:
        failed = run_all(jobs, settings.at_once, console, stop)
    outcomes = [
        read_outcome(job.arm, job.seed, job.folder, home) for job in jobs if job not in failed
    ]
    failures = [FailedRun(job.arm, job.seed, reason) for job, reason in failed.items()]
    if not outcomes:
        raise PracticumError(
            f"none of the {len(jobs)} runs finished; the first {failures[0].reason}"
        )
    return FinishedRuns(found, home, outcomes, failures)


def _show(content: Mapping[str, Any], home: Path, console: Console) -> None:
    console.table("arms", *arm_table(content))
    if content["pairs"]:
        console.table("differences", *pair_table(content))
    first, *more = content["verdict"]
    for line in more:
        console.event(line)
    console.finish(
        {
            "verdict": first,
            "table": near(home / "compare.json"),
            "page": near(home / "compare.html"),
        }
    )
