"""A comparison from its command line words to its page."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from practicum.core.stopping import catch_stop_signals
from practicum.errors import PracticumError
from practicum.recipe.methods import describe_method
from practicum.run_dir import RunDir, prepare_folder, shorten_path, write_json
from practicum.runs import check_resumes
from practicum.runs.console import Console, SilentConsole
from practicum.runs.progress import show_progress
from practicum.runs.warm import WarmStarter
from practicum.studies.compare.arms import ComparisonBudget, ComparisonSettings, Design, read_design
from practicum.studies.compare.comparison_page import write_page
from practicum.studies.compare.outcomes import (
    ComparisonResult,
    FailedRun,
    Outcome,
    compare_outcomes,
    read_outcome,
)
from practicum.studies.compare.run_jobs import (
    clear_comparison,
    open_starter,
    plan_jobs,
    run_jobs,
)
from practicum.studies.compare.tables import build_arm_table, build_pair_table


@dataclass(frozen=True, slots=True)
class FinishedRuns:
    """The finished and the failed runs of a comparison."""

    design: Design
    folder: Path
    outcomes: list[Outcome]
    failures: list[FailedRun]


def compare(  # noqa: PLR0913  (the options of a comparison, one by one)
    arms: Sequence[str],
    *,
    seeds: int = 3,
    budget: str = "steps",
    jobs: int = 2,
    out: str | Path = "runs/compare",
    resume: bool = False,
    overwrite: bool = False,
    set: Sequence[str] = (),
    progress: bool = True,
) -> ComparisonResult:
    """Compare methods on the same task, prompts, seeds and budget, as `practicum compare` does.

    An arm is a recipe or `NAME=RECIPE,key=value,...`; `set` are overrides of every arm;
    `overwrite` replaces an earlier comparison in the folder. Every run is a separate process.
    Raises what `run_comparison` raises.
    """
    limit = ComparisonBudget.parse(budget)
    settings = ComparisonSettings(
        seeds, limit, jobs, Path(out), resume, tuple(set), overwrite=overwrite
    )
    with show_progress(progress=progress) as console:
        return run_comparison(arms, settings, console)


def run_comparison(
    words: Sequence[str], settings: ComparisonSettings, console: Console | None = None
) -> ComparisonResult:
    """Run every arm with every seed, write `compare.json` and `compare.html`, and return the
    result.

    Raises RecipeError if the arms cannot be compared, Interrupted after a signal, and
    PracticumError if no run finished. Runs that failed are part of the result.
    """
    console = console or SilentConsole()
    runs = run_arms(words, settings, console)
    design, folder = runs.design, runs.folder
    first = design.seeds[0]
    methods = {arm.name: describe_method(design.recipes[arm.name][first]) for arm in design.arms}
    budget = design.budget
    limits = {} if budget.amount is None else {budget.unit: budget.amount}
    result = compare_outcomes(methods, runs.outcomes, runs.failures, limits)
    result = replace(result, verdict=[*result.verdict, *design.list_equal_arms()])
    described = {
        "arms": [asdict(arm) for arm in design.arms],
        "seeds": list(design.seeds),
        "budget": str(budget),
    }
    # Convert to JSON and back, so that page and tables get the same data as a reader of
    # compare.json.
    content = json.loads(json.dumps({"design": described, **asdict(result)}))
    write_json(folder / "compare.json", content)
    write_page(folder / "compare.html", content)
    _show(content, folder, console)
    return result


def run_arms(words: Sequence[str], settings: ComparisonSettings, console: Console) -> FinishedRuns:
    """Run every arm with every seed and read the results; raises the same errors as `compare`."""
    check_resumes(settings.resume, (), overwrite=settings.overwrite)
    with open_starter() as starter:
        return _run_arms(words, settings, console, starter)


def _run_arms(
    words: Sequence[str],
    settings: ComparisonSettings,
    console: Console,
    starter: WarmStarter | None,
) -> FinishedRuns:
    design = read_design(words, settings)
    for line in design.list_equal_arms():
        console.event(line)
    folder = settings.out.absolute()
    if settings.overwrite:
        clear_comparison(folder)
    jobs = plan_jobs(design, folder, settings.resume)
    prepare_folder(folder)
    # The lock keeps a second comparison out of the folder while this one runs.
    with RunDir(folder).lock(), catch_stop_signals() as stop:
        failed = run_jobs(jobs, settings.max_parallel_runs, console, stop, starter)
    outcomes = [
        read_outcome(job.arm, job.seed, job.folder, folder) for job in jobs if job not in failed
    ]
    failures = [FailedRun(job.arm, job.seed, reason) for job, reason in failed.items()]
    if not outcomes:
        raise PracticumError(f"all {len(jobs)} runs failed; the first {failures[0].reason}")
    return FinishedRuns(design, folder, outcomes, failures)


def _show(content: Mapping[str, Any], folder: Path, console: Console) -> None:
    """Show the tables and the verdict."""
    console.table("arms", *build_arm_table(content))
    if content["pairs"]:
        console.table("differences", *build_pair_table(content))
    first, *further_lines = content["verdict"]
    for line in further_lines:
        console.event(line)
    files = {"table": "compare.json", "page": "compare.html"}
    paths = {kind: shorten_path(folder / name) for kind, name in files.items()}
    console.finish({"verdict": first, **paths})
