"""From a reproduction's name to its results, its plot and its verdicts."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from laboratory.judging import judge_claim
from laboratory.plot import plot
from laboratory.results import Results, write_results
from laboratory.study import LoadedReproduction, load_reproduction
from practicum.core.plugins import module_of
from practicum.errors import RecipeError
from practicum.run_dir import current_versions, near, read_json, write_json, write_text
from practicum.runs.console import Console, SilentConsole


@dataclass(frozen=True, slots=True)
class ReproductionResult:
    """A reproduction that was run: what it is, what it came to, and where it stands."""

    study: LoadedReproduction
    results: Results
    folder: Path


def reproduce(
    source: str | Path,
    *,
    full: bool = False,
    out: Path = Path("runs/reproductions"),
    at_once: int = 2,
    resume: bool = False,
    console: Console | None = None,
) -> ReproductionResult:
    """Run a reproduction and write `results.json` and `plot.svg` into `out/NAME-quick` or `out/NAME-full`.

    Raises RecipeError where the folder holds one and `resume` was not asked for, and whatever its runs raise.
    """
    console = console or SilentConsole()
    study = load_reproduction(source)
    home = (out / f"{study.name}-{'full' if full else 'quick'}").absolute()
    if (home / "clock.json").is_file() != resume:
        raise RecipeError(
            f"{near(home)} already holds this reproduction; write --resume to go on with it, or --out another folder"
            if not resume
            else f"{near(home)} holds no reproduction to go on with; leave --resume out to start it"
        )
    home.mkdir(parents=True, exist_ok=True)
    with _Clock(home / "clock.json") as clock, _importable():
        found = module_of("laboratory.measures", study.spec.measure.type).measure(
            study.spec.measure, study, study.form(full), home, at_once, console
        )
    versions = {name: str(version) for name, version in current_versions().items()}
    results = replace(
        found,
        name=study.name,
        form="full" if full else "quick",
        seconds=clock.seconds,
        versions=versions,
    )
    write_results(home / "results.json", results)
    write_text(home / "plot.svg", plot(study, results))
    _show(study, results, home, console)
    return ReproductionResult(study, results, home)


def _show(study: LoadedReproduction, results: Results, home: Path, console: Console) -> None:
    rows = []
    for claim in study.spec.claims:
        verdict, judgements = judge_claim(claim, results)
        rows.append([claim.claim, verdict, "; ".join(judgement.shown for judgement in judgements)])
    console.table(study.spec.question, ["claim", "verdict", "here"], rows)
    console.finish({"results": near(home / "results.json"), "plot": near(home / "plot.svg")})


@contextmanager
def _importable() -> Iterator[None]:
    """Let the processes of the runs import this package, whose tasks their recipes name, for the block."""
    before = os.environ.get("PYTHONPATH")
    root = str(Path(__file__).resolve().parents[1])
    os.environ["PYTHONPATH"] = root if before is None else f"{root}{os.pathsep}{before}"
    try:
        yield
    finally:
        del os.environ["PYTHONPATH"]
        os.environ |= {} if before is None else {"PYTHONPATH": before}


class _Clock:
    """Seconds at work, also over several goes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.seconds: float = read_json(path)["seconds"] if path.is_file() else 0.0
        self._began = time.monotonic()
        write_json(path, {"seconds": self.seconds})

    def __enter__(self) -> "_Clock":
        self._began = time.monotonic()
        return self

    def __exit__(self, *raised: object) -> None:
        self.seconds += time.monotonic() - self._began
        write_json(self._path, {"seconds": self.seconds})
