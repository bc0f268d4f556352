"""Run a reproduction: from its name to results, a plot and verdicts."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.measuring import describe_commit, describe_machine
from laboratory.judging import judge_claim
from laboratory.plot import plot
from laboratory.results import TEACHER, Results, join_results, read_results, write_results
from laboratory.study import LoadedReproduction, ReproductionJob, load_reproduction
from practicum.core.plugins import load_plugin
from practicum.errors import RecipeError
from practicum.run_dir import collect_versions, read_json, shorten_path, write_json, write_text
from practicum.runs.console import Console, SilentConsole


@dataclass(frozen=True, slots=True)
class ReproductionResult:
    """A finished reproduction, its results and its folder."""

    study: LoadedReproduction
    results: Results
    folder: Path


def reproduce(  # noqa: PLR0913  (the options of a study, one by one)
    source: str | Path,
    *,
    full: bool = False,
    out: Path = Path("runs/reproductions"),
    at_once: int = 2,
    resume: bool = False,
    onto: Path | None = None,
    first_seed: int = 0,
    console: Console | None = None,
) -> ReproductionResult:
    """Run a reproduction.

    Writes `results.json` and `plot.svg` into `out/NAME-quick` or `out/NAME-full`, of other seeds into
    `out/NAME-full-from-SEED`. `onto` are results of the first seeds, which are not run again. All seeds are
    counted from `first_seed`. Raises RecipeError if the folder holds a reproduction and `resume` is
    False, if it holds none and `resume` is True, or if `onto` has other seeds.
    """
    console = console or SilentConsole()
    study = load_reproduction(source)
    form = "full" if full else "quick"
    seeds = f"-from-{first_seed}" if first_seed else ""
    folder = (out / f"{study.name}-{form}{seeds}").absolute()
    clock = folder / "clock.json"
    if clock.is_file() != resume:
        raise RecipeError(
            f"{shorten_path(folder)} already holds this reproduction; resume it with --resume, "
            "or set --out to another folder"
            if not resume
            else f"{shorten_path(folder)} holds no reproduction to resume; "
            "start it without --resume"
        )
    recorded = None if onto is None else _read_recorded(onto, study, form, first_seed)
    folder.mkdir(parents=True, exist_ok=True)
    scale = study.spec.full if full else study.spec.quick
    job = ReproductionJob(study, scale, folder, at_once, console, recorded, first_seed=first_seed)
    with _count_seconds(clock), _importable():
        measured = _measure(job)
    counted = read_json(clock)
    results = replace(
        measured,
        name=study.name,
        form=form,
        seconds=counted["seconds"],
        versions={
            **{name: str(version) for name, version in collect_versions().items()},
            "processor": str(describe_machine()["processor"]),
            "commit": ", ".join(counted["commits"]),
        },
        design=study.digest_design(form),
    )
    results = results if recorded is None else join_results(recorded, results)
    write_results(folder / "results.json", results)
    write_text(folder / "plot.svg", plot(study, results))
    rows = []
    for claim in study.spec.claims:
        verdict, judgements = judge_claim(claim, results)
        rows.append([claim.claim, verdict, "; ".join(judgement.text for judgement in judgements)])
    console.table(study.spec.question, ["claim", "verdict", "here"], rows)
    console.finish(
        {
            "results": shorten_path(folder / "results.json"),
            "plot": shorten_path(folder / "plot.svg"),
        }
    )
    return ReproductionResult(study, results, folder)


def _measure(job: ReproductionJob) -> Results:
    """Measure all seeds, one after another where each draws its models."""
    config = job.study.spec.measure
    measure = load_plugin("laboratory.measures", config.type).measure
    if not job.study.spec.draw_by_seed:
        return measure(config, job)
    results: Results | None = None
    for seed in job.seeds:
        # Later seeds have the learning rates of the first one's sweep.
        part = replace(job.redraw(seed), recorded=results or job.recorded)
        measured = measure(config, part)
        results = measured if results is None else join_results(results, measured)
    assert results is not None, "a reproduction has a seed"
    return results


def _read_recorded(path: Path, study: LoadedReproduction, form: str, first_seed: int) -> Results:
    """Read results of the first seeds. Raises RecipeError if they are of another reproduction."""
    recorded = read_results(path)
    scale = study.spec.full if form == "full" else study.spec.quick
    num_recorded = len(recorded.seeds)
    if (recorded.name, recorded.form) != (study.name, form) or recorded.readings.keys() - {
        TEACHER
    } != study.spec.arms.keys():
        raise RecipeError(
            f"{shorten_path(path)}: not the {form} form of {study.name} with the same arms; "
            "omit --onto to run all seeds"
        )
    if recorded.design != study.digest_design(form):
        raise RecipeError(
            f"{shorten_path(path)}: the recipe or the arms of {study.name} have changed since; "
            "omit --onto to run all seeds"
        )
    seeds = list(range(first_seed, first_seed + num_recorded))
    if list(recorded.seeds) != seeds or num_recorded >= scale.seeds:
        raise RecipeError(
            f"{shorten_path(path)}: has the seeds {list(recorded.seeds)}, and the reproduction needs "
            f"{scale.seeds}; set a larger number of seeds, which are counted from {first_seed}"
        )
    return recorded


@contextmanager
def _importable() -> Iterator[None]:
    """Let the run processes import this package, because their recipes name its tasks."""
    before = os.environ.get("PYTHONPATH")
    root = str(Path(__file__).resolve().parents[1])
    os.environ["PYTHONPATH"] = root if before is None else f"{root}{os.pathsep}{before}"
    try:
        yield
    finally:
        del os.environ["PYTHONPATH"]
        os.environ |= {} if before is None else {"PYTHONPATH": before}


@contextmanager
def _count_seconds(path: Path) -> Iterator[None]:
    """Add the seconds of the block and its commit to the file, so that resumed calls are summed."""
    saved = read_json(path) if path.is_file() else {"seconds": 0.0, "commits": []}
    commits = list(dict.fromkeys([*saved["commits"], describe_commit()]))
    # Written at the start, too: the file marks the folder as one to resume after a kill.
    write_json(path, {**saved, "commits": commits})
    began = time.monotonic()
    try:
        yield
    finally:
        seconds = saved["seconds"] + time.monotonic() - began
        write_json(path, {"seconds": seconds, "commits": commits})
