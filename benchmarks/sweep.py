"""Measure the overhead of a comparison of six toy runs in wall time, in warm processes against a new Python per run.

python -m benchmarks sweep [--steps 170] [--scratch]
"""

import json
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

from benchmarks.measuring import build_parser, format_table, open_session
from practicum.core.stopping import catch_stop_signals
from practicum.runs import run
from practicum.runs.console import SilentConsole
from practicum.studies.compare.arms import ComparisonSettings, read_design
from practicum.studies.compare.run_jobs import open_starter, plan_jobs, run_jobs

SEEDS = 3


def main() -> None:
    """Run the same six runs, one at a time, in both ways within each round."""
    parser = build_parser(__doc__)
    parser.add_argument("--steps", type=int, default=170, help="training steps of each run")
    parser.add_argument(
        "--scratch", action="store_true", help="each seed pretrains its teacher, as smoke/toy does"
    )
    options = parser.parse_args()
    session = open_session("sweep", options)
    steps = 8 if session.quick else options.steps
    rounds = 1 if session.quick else session.rounds
    table, ratios = [], []
    shares: dict[str, list[float]] = {"warm": [], "cold": []}
    phases: dict[str, list[float]] = {"warm": [], "cold": []}
    with tempfile.TemporaryDirectory() as temporary:
        changes = "" if options.scratch else _make_pair(Path(temporary))
        for number in range(rounds):
            seconds = {}
            # Turns about, so that a drift of the machine favours neither.
            for way in ("warm", "cold") if number % 2 == 0 else ("cold", "warm"):
                wall, loop, inside = _time_sweep(
                    Path(temporary) / f"{way}-{number}", changes, steps, is_warm=way == "warm"
                )
                seconds[way] = wall
                shares[way].append(1 - loop / wall)
                phases[way].append(1 - inside / wall)
                table.append([f"{way}, round {number + 1}", wall, loop, inside, shares[way][-1]])
            ratios.append(seconds["cold"] / seconds["warm"])
    head = ["way", "wall seconds", "training loops", "sample, score, update", "outside the loops"]
    print(format_table(head, table))
    figures = {
        **{f"outside_{way}": _take_median(shares[way]) for way in shares},
        **{f"outside_phases_{way}": _take_median(phases[way]) for way in phases},
        "cold_over_warm": _take_median(ratios),
    }
    session.report({}, steps=steps, scratch=options.scratch, **figures)


def _take_median(numbers: list[float]) -> float:
    return round(sorted(numbers)[len(numbers) // 2], 4)


def _make_pair(folder: Path) -> str:
    """Make the toy's two models once, and return the changes of an arm that takes them."""
    run("smoke/toy", ["train.steps=1", "evaluation.prompts=0"], out=folder, console=SilentConsole())
    models = folder / "toy" / "models"
    return f",student.model={models / 'student'},teacher.model={models / 'teacher'}"


def _time_sweep(
    folder: Path, changes: str, steps: int, *, is_warm: bool
) -> tuple[float, float, float]:
    """Return the wall seconds of a sweep, of its training loops, and of sampling, scoring and updates.

    A loop begins when the evaluation before training is written, and ends with the last step. It
    holds the steps with their readings, evaluations and checkpoints.
    """
    arms = [f"a=smoke/toy{changes}", f"b=smoke/toy,divergence=forward_kl{changes}"]
    settings = ComparisonSettings(seeds=SEEDS, common=(f"train.steps={steps}",), out=folder)
    started = time.monotonic()
    with open_starter() if is_warm else nullcontext() as starter, catch_stop_signals() as stop:
        jobs = plan_jobs(read_design(arms, settings), folder, resume=False)
        failed = run_jobs(jobs, 1, SilentConsole(), stop, starter)
    wall = time.monotonic() - started
    assert not failed, failed
    loops = sum(
        (job.folder / "metrics.jsonl").stat().st_mtime
        - (job.folder / "before.json").stat().st_mtime
        for job in jobs
    )
    return wall, loops, sum(_read_seconds(job.folder / "timings.jsonl") for job in jobs)


def _read_seconds(path: Path) -> float:
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return sum(n for row in rows for name, n in row.items() if name.startswith("seconds_"))


if __name__ == "__main__":
    main()
